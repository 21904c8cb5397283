/** The advantage that group baselines give an episode, from the rewards of its group. Pure.
 *
 * It is the trainer's (trainer/algorithms/baselines.py) with `normalize_std`, as GRPO, DAPO, GSPO and CISPO have it by default:
 * how many standard deviations the reward lies above the mean of the group.
 */

import type { EpisodeRow, GroupRewards } from "./types";

const EPSILON = 1e-4;

/** Null: no reward, an evaluation, or a group of fewer than two rewards. */
export function advantageOf(row: Pick<EpisodeRow, "mode" | "reward">, group: GroupRewards | null | undefined): number | null {
  if (row.mode === "eval" || row.reward === null || !group || group.rewards < 2) return null;
  return (row.reward - group.mean) / (group.std + EPSILON);
}

/** Null: no episode of the group has a reward. */
export function groupRewardsOf(members: readonly Pick<EpisodeRow, "reward">[]): GroupRewards | null {
  const rewards = members.flatMap((one) => (one.reward === null ? [] : [one.reward]));
  if (!rewards.length) return null;
  const mean = rewards.reduce((sum, one) => sum + one, 0) / rewards.length;
  const square = rewards.reduce((sum, one) => sum + (one - mean) ** 2, 0) / rewards.length;
  return { rewards: rewards.length, mean, std: Math.sqrt(square) };
}

/** "+1.2", "−0.4", "0". */
export function advantageWords(value: number | null): string {
  if (value === null) return "–";
  const size = Number(Math.abs(value).toPrecision(2));
  return size < 0.005 ? "0" : `${value > 0 ? "+" : "−"}${size}`;
}
