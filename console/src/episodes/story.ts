/** Conversations that one agent had one after another, because it replaced its history by a summary, as one story. Pure.
 *
 * A conversation goes on from an earlier one if its prompt quotes the end of a reply there, by the rule of `trainer/data/branches.py`.
 */

import type { TokenTable } from "./table";
import { leavesOf, pathTo } from "./tree";

/** Tokens by which a reply is recognized: its last ones but two. */
const QUOTED = 8;

/** The nodes at which the conversations of each story end, the last one a leaf. A conversation that goes on in a later one is in that story alone. */
export function storiesOf(table: TokenTable): number[][] {
  const stories = leavesOf(table.nodes).map((leaf) => storyTo(table, leaf));
  const passed = new Set(stories.flatMap((story) => story.slice(0, -1)));
  return stories.filter((story) => !passed.has(story.at(-1)!));
}

/** The story with most tokens, the later one of equals: what is shown first. */
export function longestStory(table: TokenTable, stories: readonly number[][]): number[] {
  const size = (story: readonly number[]) =>
    story.flatMap((leaf) => pathTo(table.nodes, leaf)).reduce((sum, { from, to }) => sum + to - from, 0);
  return stories.reduce((found, story) => (size(story) >= size(found) ? story : found), []);
}

function storyTo(table: TokenTable, leaf: number): number[] {
  const story = [leaf];
  for (let before = quotedBy(table, leaf); before >= 0; before = quotedBy(table, before)) story.unshift(before);
  return story;
}

/** The newest earlier reply whose end is in the prompt with which the conversation to a leaf begins; -1: there is none. */
function quotedBy(table: TokenTable, leaf: number): number {
  const path = pathTo(table.nodes, leaf);
  const first = path.findIndex(({ node }) => table.nodes[node]!.sampled);
  if (first < 0) return -1;
  const words = (from: number, to: number) => `,${table.ids.slice(from, to).join(",")},`;
  const prompt = path.slice(0, first).map(({ from, to }) => words(from, to).slice(0, -1)).join("") + ",";
  for (let i = path[first]!.node - 1; i >= 0; i--) {
    const { sampled, start, tokens } = table.nodes[i]!;
    const end = start + tokens - 2;
    if (sampled && tokens >= QUOTED + 2 && prompt.includes(words(end - QUOTED, end))) return i;
  }
  return -1;
}
