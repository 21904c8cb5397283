import { expect, test } from "vitest";
import { barsOf, branchesOf, depthsOf, leavesOf, longestOf, pathTo } from "../../src/episodes/tree";
import { drawn } from "./fixture";

// 0 prompt (3) - 1 sampled (4) - 2 prompt (2) - 3 sampled (1)
//                      \ at 2: 4 prompt (1) - 5 sampled (2)
const { nodes } = drawn([
  [-1, 0, false, ["a", "b", "c"]],
  [0, 3, true, ["d", "e", "f", "g"]],
  [1, 4, false, ["h", "i"]],
  [2, 2, true, ["j"]],
  [1, 2, false, ["k"]],
  [4, 1, true, ["l", "m"]],
]);

test("a conversation ends at each node that nothing continues whole", () => {
  expect(leavesOf(nodes)).toEqual([3, 5]);
});

test("the longest conversation is shown first", () => {
  expect(longestOf(nodes)).toBe(3);
  expect(longestOf([])).toBe(-1);
});

test("the path to a branch has of its parent only what it continues", () => {
  expect(pathTo(nodes, 5)).toEqual([
    { node: 0, from: 0, to: 3 },
    { node: 1, from: 3, to: 5 },
    { node: 4, from: 10, to: 11 },
    { node: 5, from: 11, to: 13 },
  ]);
});

test("depths count the tokens of the path", () => {
  expect(depthsOf(nodes)).toEqual([0, 3, 7, 9, 5, 6]);
});

test("branches stand under what they left, before it goes straight on", () => {
  expect(branchesOf(nodes)).toEqual([
    { node: 0, indent: 0 },
    { node: 1, indent: 0 },
    { node: 4, indent: 1 },
    { node: 5, indent: 1 },
    { node: 2, indent: 0 },
    { node: 3, indent: 0 },
  ]);
});

test("a way straight on keeps its lane, and bars of a lane do not overlap", () => {
  const bars = barsOf(nodes);
  expect(bars.map((bar) => bar.lane)).toEqual([0, 0, 0, 0, 1, 1]);
  expect(bars[4]).toMatchObject({ from: 5, to: 6, parentLane: 0 });
});

test("a prompt that two conversations share is the beginning of both", () => {
  const shared = drawn([
    [-1, 0, false, ["a"]],
    [0, 1, true, ["b"]],
    [0, 1, true, ["c"]],
  ]).nodes;
  expect(leavesOf(shared)).toEqual([1, 2]);
  expect(new Set(barsOf(shared).map((bar) => bar.lane)).size).toBe(2);
});

test("of two ways from one place the longer one goes straight on", () => {
  const retried = drawn([
    [-1, 0, false, ["a"]],
    [0, 1, true, ["b"]],
    [1, 1, false, ["c"]],
    [0, 1, true, ["d"]],
  ]).nodes;
  expect(branchesOf(retried).map(({ node, indent }) => [node, indent])).toEqual([[0, 0], [3, 1], [1, 0], [2, 0]]);
});
