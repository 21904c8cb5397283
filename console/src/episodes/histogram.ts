/** Where the bars and the brush of the histogram stand. Pure; places are shares of the width, from 0 to 1. */

import type { Histogram } from "./types";
import { count, moment, number } from "./words";

export interface Bin {
  x: number;
  width: number;
  /** Heights as shares of the tallest bar, from below: rewarded, closed without a reward, still running. */
  rewarded: number;
  unrewarded: number;
  running: number;
}

export function binsOf(histogram: Histogram): Bin[] {
  const most = Math.max(1, ...histogram.counts);
  const width = 1 / Math.max(histogram.counts.length, 1);
  return histogram.counts.map((all, i) => ({
    x: i * width,
    width,
    rewarded: histogram.rewarded[i]! / most,
    unrewarded: (histogram.closed[i]! - histogram.rewarded[i]!) / most,
    running: (all - histogram.closed[i]!) / most,
  }));
}

/** The moment at a place of the width. */
export function momentAt(histogram: Histogram, x: number): number {
  return (histogram.from ?? 0) + Math.min(Math.max(x, 0), 1) * ((histogram.to ?? 0) - (histogram.from ?? 0));
}

/** The place of a moment; of one outside, the nearer end. */
export function placeOf(histogram: Histogram, at: number): number {
  const wide = (histogram.to ?? 0) - (histogram.from ?? 0);
  return wide > 0 ? Math.min(Math.max((at - (histogram.from ?? 0)) / wide, 0), 1) : 0;
}

/** The times that were brushed between two places, on the bounds of bins; null: the whole width, so there is no selection. */
export function brushed(histogram: Histogram, one: number, other: number): { since: number | null; until: number | null } | null {
  const n = histogram.counts.length;
  const from = Math.min(Math.max(Math.floor(Math.min(one, other) * n), 0), n - 1);
  const to = Math.max(from + 1, Math.min(Math.ceil(Math.max(one, other) * n), n));
  if (from === 0 && to === n) return null;
  // The first and the last bound stay open: what is opened later belongs to a choice that reaches the end.
  return { since: from === 0 ? null : momentAt(histogram, from / n), until: to === n ? null : momentAt(histogram, to / n) };
}

/** A bin in words, for the line under the pointer. */
export function binWords(histogram: Histogram, i: number): string {
  const n = histogram.counts.length;
  const mean = histogram.reward_mean[i];
  const times = `${moment(momentAt(histogram, i / n))} to ${moment(momentAt(histogram, (i + 1) / n))}`;
  const rewarded = `${histogram.rewarded[i]} rewarded`;
  return `${times}: ${count(histogram.counts[i]!, "episode")}, ${rewarded}${mean == null ? "" : `, mean ${number(mean, 3)}`}`;
}
