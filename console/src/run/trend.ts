// Is it learning? Evaluations as points of the run's steps, the change since its start, and the answer in a sentence. Pure.
import { plural, short } from "../format";
import type { Column, Steps } from "./steps";

/** The rewards of the evaluation episodes of a version, of every program that ran them. */
export interface Evaluation {
  version: number;
  episodes: number;
  reward_mean: number;
  reward_std: number;
  at: number;
}

export type Trend = "rising" | "falling" | "flat";

export interface Verdict {
  words: string;
  tone: "good" | "bad" | "plain";
}

const HELD_OUT = "eval/reward_mean";
/** Fewer steps show no trend. */
const FEWEST = 5;
/** A slope or a difference counts from this many standard errors. */
const ERRORS = 2;

const known = (column: Column | undefined): number[] => (column ?? []).filter((value) => value !== null);
const mean = (values: readonly number[]) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** The steps with the evaluations of their versions, and with one before the first step for the version that the run began with.
 * A figure of the trainer stays. */
export function evaluated(steps: Steps, evaluations: readonly Evaluation[]): Steps {
  const first = steps.version.findIndex((version) => version !== null);
  if (first < 0 || !evaluations.length) return steps;
  const byVersion = new Map(evaluations.map((one) => [one.version, one]));
  const before = byVersion.get(steps.version[first]! - 1);
  const column = steps.figures[HELD_OUT] ?? steps.step.map(() => null);
  const values = column.map((value, i) => {
    const version = steps.version[i] ?? null;
    const made = version !== null && version !== steps.version[i - 1];
    return value ?? (made ? (byVersion.get(version)?.reward_mean ?? null) : null);
  });
  if (!before || first > 0) return { ...steps, figures: { ...steps.figures, [HELD_OUT]: values } };
  const figures = Object.fromEntries(Object.entries(steps.figures).map(([name, known]) => [name, [null, ...known]]));
  return {
    ...steps,
    step: [steps.step[0]! - 1, ...steps.step],
    version: [before.version, ...steps.version],
    at: [Math.min(before.at, steps.at[0]!), ...steps.at],
    figures: { ...figures, [HELD_OUT]: [before.reward_mean, ...values] },
  };
}

/** The mean of the first and of the last values: of up to `width`, and never of the same ones. Null: fewer than two are known. */
export function ends(column: Column | undefined, width = FEWEST): [first: number, last: number] | null {
  const values = known(column);
  if (values.length < 2) return null;
  const some = Math.min(width, Math.floor(values.length / 2));
  return [mean(values.slice(0, some)), mean(values.slice(-some))];
}

/** The sign of the least-squares slope, where it is clear of its standard error. Null: too few values. */
export function trendOf(column: Column | undefined): Trend | null {
  const values = known(column);
  const n = values.length;
  if (n < FEWEST) return null;
  const middle = (n - 1) / 2;
  const level = mean(values);
  const spread = (n * (n * n - 1)) / 12;
  const slope = values.reduce((sum, value, i) => sum + (i - middle) * (value - level), 0) / spread;
  const rest = values.reduce((sum, value, i) => sum + (value - level - slope * (i - middle)) ** 2, 0);
  const error = Math.sqrt(rest / (n - 2) / spread);
  return Math.abs(slope) <= ERRORS * error ? "flat" : slope > 0 ? "rising" : "falling";
}

const WORDS: Record<Trend, string> = { rising: "rising", falling: "falling", flat: "no clear change" };

/** The column that "training reward" means: of all episodes where the trainer reports it, since the batch is a selection. */
export const trainingReward = (steps: Steps): Column | undefined =>
  known(steps.figures["reward_mean_all"]).length ? steps.figures["reward_mean_all"] : steps.figures["reward_mean"];

/** Whether the run learns, in a sentence for the evaluations and one for the training reward. `steps` comes from `evaluated`. */
export function verdict(steps: Steps, evaluations: readonly Evaluation[]): Verdict | null {
  const heldOut = heldOutOf(steps, evaluations);
  const column = trainingReward(steps);
  const training = trendOf(column);
  const sentences: string[] = [];
  if (heldOut) sentences.push(heldOut.words);
  const reward = ends(column);
  const count = known(column).length;
  if (reward && training) sentences.push(`Training reward ${short(reward[0])} to ${short(reward[1])}, ${WORDS[training]}${heldOut ? "" : over(count)}.`);
  else if (count) sentences.push(`Training reward ${short(known(column).at(-1))} after ${plural(count, "step")}: too few to see a trend.`);
  if (!sentences.length) return null;
  const trend = heldOut?.trend ?? training;
  const tone = trend === "rising" ? "good" : trend === "falling" ? "bad" : "plain";
  return { words: sentences.join(" "), tone };
}

const over = (steps: number) => ` over ${plural(steps, "step")}`;

function heldOutOf(steps: Steps, evaluations: readonly Evaluation[]): { words: string; trend: Trend | null } | null {
  const places = (steps.figures[HELD_OUT] ?? []).flatMap((value, i) => (value === null ? [] : [{ value, i }]));
  const [first, last] = [places[0], places.at(-1)];
  if (!first || !last) return null;
  if (first === last) return { words: `Held out ${short(first.value)} in the only evaluation.`, trend: null };
  const trend = heldOutTrend(steps, evaluations, first, last);
  return { words: `Held out ${short(first.value)} to ${short(last.value)}, ${WORDS[trend]}${over(steps.step[last.i]! - steps.step[first.i]!)}.`, trend };
}

/** By the standard error of the two means; where their episodes are not known, by the sign of the difference. */
function heldOutTrend(steps: Steps, evaluations: readonly Evaluation[], first: { value: number; i: number }, last: { value: number; i: number }): Trend {
  const by = last.value - first.value;
  const variance = (i: number) => {
    const found = evaluations.find((one) => one.version === steps.version[i]);
    return found ? found.reward_std ** 2 / found.episodes : null;
  };
  const [before, after] = [variance(first.i), variance(last.i)];
  if (before !== null && after !== null && Math.abs(by) <= ERRORS * Math.sqrt(before + after)) return "flat";
  return by === 0 ? "flat" : by > 0 ? "rising" : "falling";
}
