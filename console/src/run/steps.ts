// The steps of a run as columns: fetched once, then extended by the trainer's events. Pure, except for the two requests at the end.
import { get } from "../api";
import type { Evaluation } from "./trend";

export type Column = readonly (number | null)[];

export interface Steps {
  model: string;
  run: string;
  /** Steps that one point stands for. */
  every: number;
  step: readonly number[];
  version: Column;
  /** Seconds since 1970. */
  at: readonly number[];
  figures: Readonly<Record<string, Column>>;
}

export interface Run {
  run: string;
  model: string;
  steps: number;
  last_step: number;
  began_at: number;
  ended_at: number;
  last_version: number | null;
}

export interface StepEvent {
  step: number;
  version?: number | null;
  at: number;
  figures: Record<string, number>;
}

const set = <T>(column: readonly T[], index: number, value: T): T[] => {
  const copy = column.slice();
  copy[index] = value;
  return copy;
};

/** The steps with one more; figures that come later for a step that is known (an evaluation) join it. */
export function grown(steps: Steps, event: StepEvent): Steps {
  const last = steps.step.length - 1;
  const place = event.step > (steps.step[last] ?? -1) ? last + 1 : steps.step.indexOf(event.step);
  if (place < 0) return steps;
  const figures: Record<string, Column> = {};
  for (const name of new Set([...Object.keys(steps.figures), ...Object.keys(event.figures)])) {
    const column = steps.figures[name] ?? steps.step.map(() => null);
    const value = event.figures[name] ?? column[place] ?? null;
    figures[name] = set(column, place, value);
  }
  return {
    ...steps,
    step: set(steps.step, place, event.step),
    version: set(steps.version, place, event.version ?? steps.version[place] ?? null),
    at: place > last ? set(steps.at, place, event.at) : steps.at,
    figures,
  };
}

/** The mean of the known values among the last `width` ones, at each place. */
export function smoothed(column: Column, width: number): Column {
  if (width <= 1) return column;
  return column.map((value, end) => {
    if (value === null) return null;
    const known = column.slice(Math.max(0, end - width + 1), end + 1).filter((one) => one !== null);
    return known.reduce((sum, one) => sum + one, 0) / known.length;
  });
}

/** Two runs over one another: every x of either, and how to bring a column of each to it. */
export function joined(a: readonly number[], b: readonly number[]): { x: number[]; ofA: (column: Column) => Column; ofB: (column: Column) => Column } {
  const x = [...new Set([...a, ...b])].sort((one, other) => one - other);
  const place = new Map(x.map((value, index) => [value, index]));
  const brought = (from: readonly number[]) => (column: Column) => {
    const whole: (number | null)[] = new Array(x.length).fill(null);
    from.forEach((value, index) => (whole[place.get(value)!] = column[index] ?? null));
    return whole;
  };
  return { x, ofA: brought(a), ofB: brought(b) };
}

export const loadEvaluations = (model: string, signal: AbortSignal) =>
  get<{ evaluations: Evaluation[] }>("/admin/v1/evaluations", { model }, signal).then((response) => response.evaluations);

export const loadRuns = (model: string | undefined, signal: AbortSignal) =>
  get<{ runs: Run[] }>("/admin/v1/runs", { model }, signal).then((response) => response.runs);

export const loadSteps = (run: Run, signal: AbortSignal) =>
  get<Steps>("/admin/v1/steps", { model: run.model, run: run.run, points: 2000 }, signal);
