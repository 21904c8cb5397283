import { expect, test } from "vitest";
import { longestStory, storiesOf } from "../../src/episodes/story";
import { drawn } from "./fixture";

const words = (count: number) => Array.from({ length: count }, () => "w");

// 0 prompt - 1 reply - 2 prompt - 3 summary (ids 118 to 129); 4 another prompt of 12 tokens - 5 reply
const tree = (quoted: number[]) => {
  const nodes = [words(3), words(12), words(3), words(12), words(12), words(2)];
  const table = drawn(nodes.map((texts, i) => [[-1, 0, 1, 2, -1, 4][i]!, i && i !== 4 ? nodes[i - 1]!.length : 0, i % 2 === 1, texts]));
  table.ids.set(quoted, table.nodes[4]!.start + 2);
  return table;
};
const SUMMARY_END = [120, 121, 122, 123, 124, 125, 126, 127];

test("a conversation whose prompt quotes the end of a summary goes on from it", () => {
  expect(storiesOf(tree(SUMMARY_END))).toEqual([[3, 5]]);
});

test("without the quotation there are two conversations, and the longer one is shown", () => {
  const table = tree(SUMMARY_END.slice(1));
  expect(storiesOf(table)).toEqual([[3], [5]]);
  expect(longestStory(table, storiesOf(table))).toEqual([3]);
  expect(longestStory(table, [])).toEqual([]);
});
