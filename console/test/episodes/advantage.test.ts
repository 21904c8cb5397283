import { expect, test } from "vitest";
import { advantageOf, advantageWords, groupRewardsOf } from "../../src/episodes/advantage";

const train = (reward: number | null) => ({ mode: "train" as const, reward });

test("an advantage is the reward's distance from the group's mean in standard deviations, as in the trainer", () => {
  const group = groupRewardsOf([train(1), train(1), train(1), ...new Array(5).fill(train(0)), train(null)]);
  expect(group).toEqual({ rewards: 8, mean: 0.375, std: Math.sqrt(0.234375) });
  expect([advantageOf(train(1), group), advantageOf(train(0), group)].map(advantageWords)).toEqual(["+1.3", "−0.77"]);
});

test("equal rewards have the advantage 0; an evaluation, no reward, and a group of one have none", () => {
  const equal = groupRewardsOf([train(0.5), train(0.5)]);
  expect(advantageWords(advantageOf(train(0.5), equal))).toBe("0");
  expect([advantageOf({ mode: "eval", reward: 1 }, equal), advantageOf(train(null), equal), advantageOf(train(1), groupRewardsOf([train(1)])), groupRewardsOf([])]).toEqual(
    [null, null, null, null],
  );
});
