import { expect, test } from "vitest";
import { apiParameters, filtersOf, NO_FILTERS, rangeOf, searchOf } from "../../src/episodes/query";

test("filters survive the address, and empty ones are not in it", () => {
  const filters = { ...NO_FILTERS, task: "sums & more", version: "3..5", since: 1795480991.5 };
  expect(filtersOf(new URLSearchParams(searchOf(filters)))).toEqual(filters);
  expect(searchOf(NO_FILTERS)).toBe("");
});

test("a range of versions and rewards becomes the bounds of the API", () => {
  const asked = apiParameters({ ...NO_FILTERS, version: "3..5", reward: "..0.5", group: "g-1" });
  expect(Object.fromEntries(asked)).toEqual({ version_min: "3", version_max: "5", reward_max: "0.5", group_id: "g-1" });
});

test.each([
  ["4", { min: 4, max: 4 }],
  ["-1..-0.5", { min: -1, max: -0.5 }],
  ["2..", { min: 2 }],
  ["", {}],
  ["..", null],
  ["1..2..3", null],
  ["many", null],
])("the range %j is %j", (text, range) => {
  expect(rangeOf(text)).toEqual(range);
});

test("a time in the address that is none is no filter", () => {
  expect(filtersOf(new URLSearchParams("since=yesterday&until=-3"))).toEqual(NO_FILTERS);
});
