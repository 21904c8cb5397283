import { afterEach, expect, test, vi } from "vitest";
import { asking, giveKey } from "../src/api";
import { watch, type Message } from "../src/stream";

afterEach(() => vi.unstubAllGlobals());

const streamed = (text: string) => new Response(text, { headers: { "Content-Type": "text/event-stream" } });
const refused = (status: number, code: string) => new Response(JSON.stringify({ error: { message: "no", code } }), { status });

test("a stream that is cut goes on after the last id that it had, with the key", async () => {
  giveKey("the-key");
  const asked: (string | null)[][] = [];
  const answers = [streamed("id: 7\nevent: a\ndata: {}\n\nid: 9\n\nid: 10\ndata: cut"), streamed("id: 11\ndata: {}\n\n")];
  const gone = new AbortController();
  vi.stubGlobal("fetch", async (_: string, init: { headers: Headers }) => {
    asked.push([init.headers.get("Last-Event-ID"), init.headers.get("Authorization")]);
    return answers.shift() ?? (gone.abort(), refused(503, "stopping"));
  });
  const told: Message[] = [];
  await watch("/admin/v1/events", {}, gone.signal, (messages) => told.push(...messages));
  expect(asked.slice(0, 3)).toEqual([
    [null, "Bearer the-key"],
    ["9", "Bearer the-key"],
    ["11", "Bearer the-key"],
  ]);
  expect(told.map((message) => message.id)).toEqual(["7", "11"]);
});

test("a refused key ends the stream and asks for another", async () => {
  giveKey("wrong");
  vi.stubGlobal("fetch", async () => refused(401, "invalid_admin_key"));
  const states: string[] = [];
  await watch("/admin/v1/events", {}, new AbortController().signal, () => {}, (state) => states.push(state));
  expect([states.at(-1), asking.value]).toEqual(["ended", "The gateway refuses this key."]);
});
