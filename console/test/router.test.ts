import { expect, test } from "vitest";
import { href, parse } from "../src/router";

test("an address leads back to its parts, whatever is in them", () => {
  const { path, query } = parse(href("episodes", "ep/1 ä?", { group: "a&b=c", empty: "" }));
  expect(path).toEqual(["episodes", "ep/1 ä?"]);
  expect([...query]).toEqual([["group", "a&b=c"]]);
});
