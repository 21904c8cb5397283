import { expect, test } from "vitest";
import type { EpisodeRow } from "../src/episodes/types";
import { compared } from "../src/run/compare";

const row = (task_id: string, reward: number | null, episode_id = task_id) => ({ task_id, reward, episode_id }) as EpisodeRow;

test("evaluations are compared task by task, the largest loss first; episodes without a reward and tasks of one do not count", () => {
  const before = [row("a", 1), row("b", 0, "b1"), row("b", 1, "b2"), row("c", 0.5), row("gone", 1), row("failed", null)];
  const after = [row("a", 0), row("b", 1), row("c", 0.5), row("new", 1), row("failed", 1)];
  const found = compared(before, after);
  expect(found.pairs.map((pair) => [pair.task, pair.before.mean, pair.after.mean, pair.by])).toEqual([["a", 1, 0, -1], ["c", 0.5, 0.5, 0], ["b", 0.5, 1, 0.5]]);
  expect([found.better, found.worse, found.alone, found.pairs[2]!.before.first.episode_id]).toEqual([1, 1, 3, "b1"]);
});
