import { expect, test } from "vitest";
import { Parser } from "../src/stream";

test("messages cut anywhere are put together, and ids without data move the place to resume", () => {
  const text = ": up to 4\nid: 4\n\nid: 5\nevent: episode.closed\ndata: {\"a\":\ndata: 1}\n\nid: 6\n\n";
  for (let cut = 0; cut <= text.length; cut += 1) {
    const parser = new Parser();
    const found = [...parser.feed(text.slice(0, cut)), ...parser.feed(text.slice(cut))];
    expect(found).toEqual([{ id: "5", event: "episode.closed", data: '{"a":\n1}' }]);
    expect(parser.last).toBe("6");
  }
});
