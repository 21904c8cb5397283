/** What colors a token: a choice of figure becomes one of a few classes, and a legend with the meaning of each.
 *
 * Pure. Classes are names in the style sheet (`s0`..`s6` in order, `d0`..`d6` about a middle, `c0`..`c7` apart), so that light and
 * dark are the style sheet's, and a view changes its colors without new elements. An empty class has no color.
 */

import { FLAGS, flagsOf, maskOf, nodeAt, type TokenTable } from "./table";

export const MODES = ["version", "logprob", "entropy", "advantage", "weight", "mismatch", "mask", "flag"] as const;
export type Mode = (typeof MODES)[number];

export const NAMES: Record<Mode, string> = {
  version: "version",
  logprob: "log-probability",
  entropy: "entropy",
  advantage: "advantage",
  weight: "importance weight",
  mismatch: "trainer mismatch",
  mask: "mask",
  flag: "flag",
};

/** What each shows, in a line under the legend. */
export const MEANINGS: Record<Mode, string> = {
  version: "the weights that sampled the token",
  logprob: "how likely the token was when it was sampled, in nats: darker is less likely",
  entropy: "how undecided the policy is at the token, in nats, as the trainer computed it",
  advantage: "how much better than its group the token's episode did: trained towards, or away from",
  weight: "the trained policy's probability over the sampling one's: 1 is on policy, 0 is masked",
  mismatch: "the trainer's log-probability less the engine's, in nats: near 0 where both compute the same",
  mask: "which tokens are trained, and why the others are not",
  flag: "tokens that were not drawn from the policy's own distribution",
};

export interface LegendEntry {
  cls: string;
  label: string;
  /** Tokens of the class. */
  count: number;
}

export interface Coloring {
  mode: Mode;
  /** The class of a token. */
  cls: (token: number) => string;
  legend: LegendEntry[];
  /** Why there is nothing to see; empty if there is. */
  nothing: string;
}

/** Upper ends of the classes; the last class has none. */
const LOGPROB = [-0.01, -0.1, -0.5, -1, -2, -4];
const ENTROPY = [0.01, 0.1, 0.5, 1, 2, 4];
const WEIGHT = [0.5, 0.8, 0.95, 1.05, 1.25, 2];
const SIGNED = [-1, -0.25, -0.02, 0.02, 0.25, 1];
const MISMATCH = [-0.5, -0.1, -0.01, 0.01, 0.1, 0.5];
const CATEGORIES = 8;

/** The class [0, bounds.length] of a value: the number of bounds that are below it. */
export function classOf(value: number, bounds: readonly number[]): number {
  let at = 0;
  while (at < bounds.length && value > bounds[at]!) at++;
  return at;
}

/** The class of a log-probability: 0 is sure, the last is most surprising. */
export function surprise(logprob: number): number {
  let at = 0;
  while (at < LOGPROB.length && logprob < LOGPROB[at]!) at++;
  return at;
}

/** `advantage`: the episode's, which all its sampled tokens have where the trainer wrote no figures by token. */
export function coloringOf(table: TokenTable, mode: Mode, advantage: number | null = null): Coloring {
  const trained = table.trained;
  const computed = (column: Float32Array | undefined, kind: "s" | "d", bounds: readonly number[]): Coloring => {
    if (!column) return { mode, cls: () => "", legend: [], nothing: table.untrainedWhy };
    const cls = (token: number) => (Number.isNaN(column[token]!) ? "" : `${kind}${classOf(column[token]!, bounds)}`);
    return counted(table, { mode, cls, legend: ranges(kind, bounds), nothing: "" });
  };
  switch (mode) {
    case "version":
      return byVersion(table);
    case "logprob": {
      const cls = (token: number) => (Number.isNaN(table.logprobs[token]!) ? "" : `s${surprise(table.logprobs[token]!)}`);
      return counted(table, { mode, cls, legend: logprobRanges(), nothing: "" });
    }
    case "entropy":
      return computed(trained?.entropy, "s", ENTROPY);
    case "advantage":
      if (!trained && advantage !== null) {
        const cls = (token: number) => (nodeAt(table, token).sampled && !maskOf(table, token) ? `d${classOf(advantage, SIGNED)}` : "");
        return counted(table, { mode, cls, legend: ranges("d", SIGNED), nothing: "" });
      }
      return computed(trained?.advantage, "d", SIGNED);
    case "weight":
      return computed(trained?.weight, "d", WEIGHT);
    case "mismatch":
      return computed(trained?.mismatch, "d", MISMATCH);
    case "mask":
      return byWord(table, mode, (token) => (nodeAt(table, token).sampled ? maskOf(table, token) || "trained, or may be" : ""));
    case "flag":
      return byWord(table, mode, (token) => flagsOf(table.flags[token]!).join(" + "));
  }
}

function byVersion(table: TokenTable): Coloring {
  const versions = [...new Set(table.versions)].filter((v) => v >= 0).sort((a, b) => a - b);
  const place = new Map(versions.map((version, i) => [version, `c${i % CATEGORIES}`]));
  const cls = (token: number) => place.get(table.versions[token]!) ?? "";
  // More versions than colors: a color stands for several, and the legend names them all.
  const legend: LegendEntry[] = [];
  for (const version of versions) {
    const entry = legend.find((one) => one.cls === place.get(version));
    if (entry) entry.label += `, ${version}`;
    else legend.push({ cls: place.get(version)!, label: `version ${version}`, count: 0 });
  }
  return counted(table, { mode: "version", cls, legend, nothing: versions.length ? "" : "nothing was sampled" });
}

function byWord(table: TokenTable, mode: Mode, word: (token: number) => string): Coloring {
  const classes = new Map<string, string>();
  for (let token = 0; token < table.ids.length; token++) {
    const found = word(token);
    if (found && !classes.has(found)) classes.set(found, `c${classes.size % CATEGORIES}`);
  }
  const legend = [...classes].map(([label, cls]) => ({ cls, label, count: 0 }));
  const counts = new Map<string, number>();
  for (let token = 0; token < table.ids.length; token++) counts.set(word(token), (counts.get(word(token)) ?? 0) + 1);
  for (const entry of legend) entry.count = counts.get(entry.label) ?? 0;
  const nothing = legend.length ? "" : mode === "flag" ? "no token has a flag" : "nothing was sampled";
  return { mode, cls: (token) => classes.get(word(token)) ?? "", legend, nothing };
}

function counted(table: TokenTable, coloring: Coloring): Coloring {
  const counts = new Map<string, number>();
  for (let token = 0; token < table.ids.length; token++) {
    const cls = coloring.cls(token);
    counts.set(cls, (counts.get(cls) ?? 0) + 1);
  }
  for (const entry of coloring.legend) entry.count = counts.get(entry.cls) ?? 0;
  return coloring;
}

function ranges(kind: "s" | "d", bounds: readonly number[]): LegendEntry[] {
  const last = bounds.length - 1;
  return Array.from({ length: bounds.length + 1 }, (_, i) => ({
    cls: `${kind}${i}`,
    label: i === 0 ? `to ${bounds[0]}` : i > last ? `over ${bounds[last]}` : `${bounds[i - 1]} to ${bounds[i]}`,
    count: 0,
  }));
}

function logprobRanges(): LegendEntry[] {
  const last = LOGPROB.length - 1;
  return Array.from({ length: LOGPROB.length + 1 }, (_, i) => ({
    cls: `s${i}`,
    label: i === 0 ? `${LOGPROB[0]} to 0` : i > last ? `under ${LOGPROB[last]}` : `${LOGPROB[i]} to ${LOGPROB[i - 1]}`,
    count: 0,
  }));
}

/** The meaning of a flag's name. */
export function flagWords(name: string): string {
  return FLAGS.find(([, known]) => known === name)?.[2] ?? name;
}
