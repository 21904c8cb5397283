import { expect, test } from "vitest";
import { armsOf, placeOf, type Arm, type Trial } from "../src/canary/types";

const arm: Arm = { conversations: 2, rewarded: 1, reward_mean: 1, reward_low: 0, reward_high: 1, faulty_share: 0, refused_share: 0, tokens_mean: 4, seconds_per_token: 0.1 };
const trial = { version: 7, live: 6, low: -1, high: 3, figures: { candidate: arm, live: { ...arm, conversations: 9 } } } as Trial;

test("the candidate is first, and each arm has its version", () => {
  expect(armsOf(trial).map((one) => [one.name, one.version, one.conversations])).toEqual([["candidate", 7, 2], ["live", 6, 9]]);
  expect(armsOf({ ...trial, figures: null })).toEqual([]);
});

test("a reward has its place in the range, at its ends too", () => {
  expect([-1, 1, 3, 9, -9].map((value) => placeOf(value, trial))).toEqual([0, 0.5, 1, 1, 0]);
});
