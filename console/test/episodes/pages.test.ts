import { expect, test } from "vitest";
import { Pages } from "../../src/episodes/pages";

test("a page is asked for once, and again only after a failure", () => {
  const pages = new Pages<number>(100);
  expect(pages.missing(150, 320)).toEqual([1, 2, 3]);
  expect(pages.missing(150, 320)).toEqual([]);
  pages.failed(2);
  expect(pages.missing(150, 320)).toEqual([2]);
});

test("rows are found by their place in the whole list", () => {
  const pages = new Pages<string>(2);
  pages.put(1, ["c", "d"]);
  expect([0, 1, 2, 3, 4].map((i) => pages.row(i))).toEqual([undefined, undefined, "c", "d", undefined]);
});

test("the pages that came first go first", () => {
  const pages = new Pages<number>(1, 2);
  for (const page of [0, 1, 2]) pages.put(page, [page]);
  expect([0, 1, 2].map((i) => pages.row(i))).toEqual([undefined, 1, 2]);
});

test("an update says whether it changed a row that is here", () => {
  const pages = new Pages<number>(2);
  pages.put(0, [1, 2]);
  expect(pages.update((n) => n)).toBe(false);
  expect(pages.update((n) => (n === 2 ? 20 : n))).toBe(true);
  expect(pages.row(1)).toBe(20);
});
