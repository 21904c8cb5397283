// Which figures the run's charts show, and how figures are made of others. Names are those of metrics.jsonl (docs/guide/console.md).
import type { Column, Steps } from "./steps";

export interface Curve {
  label: string;
  color: string;
  of: (steps: Steps) => Column | undefined;
  points?: boolean;
}

export const GROUPS = ["Learning", "Data", "Speed"] as const;
export type Group = (typeof GROUPS)[number];

export interface Plot {
  id: string;
  title: string;
  /** One sentence: how to read it. */
  hint: string;
  curves: Curve[];
  group: Group;
  /** The signal of Health that judges the first curve, and has its range. */
  signal?: string;
  format?: "share" | "seconds";
}

const figure =
  (name: string) =>
  (steps: Steps): Column | undefined =>
    steps.figures[name];

const curve = (label: string, color: number, name: string, more: Partial<Curve> = {}): Curve => ({
  label,
  color: `--series-${color}`,
  of: figure(name),
  ...more,
});

/** Failures that are the agent's own, and not of what it runs on (gateway/observe/explain.py has all reasons). */
const AGENTS_OWN = new Set([
  "agent_failed", "no_calls", "no_reward", "reward_refused", "time_limit", "memory_limit", "cpu_limit", "process_limit", "idle_deadline", "total_deadline",
]);

/** The share of episodes that infrastructure lost: tools, sandboxes, environments, graders, engines. */
export function infrastructure(steps: Steps): Column | undefined {
  const share = steps.figures["excluded_share"];
  const reasons = Object.keys(steps.figures).filter((name) => name.startsWith("excluded/"));
  return share?.map((value, i) => {
    if (value === null) return null;
    const counts = reasons.map((name) => [name.slice("excluded/".length), steps.figures[name]![i] ?? 0] as const);
    const all = counts.reduce((sum, [, count]) => sum + count, 0);
    const lost = counts.reduce((sum, [reason, count]) => sum + (AGENTS_OWN.has(reason) ? 0 : count), 0);
    if (all) return (value * lost) / all;
    return value ? null : 0;
  });
}

export function ratio(over: string, under: string): Curve["of"] {
  return (steps) => {
    const below = steps.figures[under];
    return steps.figures[over]?.map((value, i) => (value !== null && below?.[i] ? value / below[i] : null));
  };
}

const NOT_PHASES = new Set(["seconds/total", "seconds/idle", "seconds/compute"]);

/** Return the curve of the whole step, and of the phases that take longest. */
export function phases(steps: Steps): Curve[] {
  const mean = (column: Column) => {
    const known = column.filter((value) => value !== null);
    return known.reduce((sum, value) => sum + value, 0) / (known.length || 1);
  };
  const names = Object.keys(steps.figures).filter((name) => name.startsWith("seconds/") && !NOT_PHASES.has(name));
  const longest = names.sort((a, b) => mean(steps.figures[b]!) - mean(steps.figures[a]!)).slice(0, 5);
  const shown = longest.map((name, i) => curve(name.slice("seconds/".length), i + 1, name));
  return [curve("whole step", 6, "seconds/total"), ...shown];
}

/** The wide chart on top: does the reward rise? */
export const REWARD: Plot = {
  id: "reward",
  group: "Learning",
  title: "Reward",
  hint: "Rises over tens of steps, with noise. The evaluation rises with it. The batch is what [staleness] filters left.",
  curves: [
    curve("all episodes", 3, "reward_mean_all"),
    curve("trained batch", 1, "reward_mean"),
    curve("evaluation", 2, "eval/reward_mean", { points: true }),
  ],
};

export const PLOTS: Plot[] = [
  {
    id: "excluded",
    group: "Data",
    title: "Excluded episodes",
    hint: "Failed episodes do not count as zeros: they are excluded. Below 2 % is healthy.",
    signal: "excluded_share",
    curves: [curve("all failures", 4, "excluded_share"), { label: "infrastructure", color: "--series-2", of: infrastructure }],
    format: "share",
  },
  {
    id: "groups",
    group: "Data",
    title: "Groups of equal rewards, truncated episodes",
    hint: "Groups of equal rewards have no gradient: below half. Truncated: below 10 %.",
    signal: "equal_reward_groups",
    curves: [
      curve("equal rewards, of all groups", 3, "equal_reward_groups_all"),
      curve("equal rewards, of the batch", 1, "equal_reward_groups"),
      curve("truncated", 2, "truncated_episodes"),
    ],
    format: "share",
  },
  { id: "loss", group: "Learning", title: "Loss", hint: "Means little by itself in RL, except for a jump.", curves: [curve("loss", 1, "loss")] },
  {
    id: "kl",
    group: "Learning",
    title: "KL to the sampler",
    hint: "Above 0.1 the data is too old: a smaller eta, or fewer minibatches.",
    signal: "kl_recorded_k3",
    curves: [curve("k3", 3, "kl_recorded_k3")],
  },
  { id: "entropy", group: "Learning", title: "Entropy", hint: "Falls slowly. Near 0 within some steps: collapse.", curves: [curve("nats a token", 5, "entropy")] },
  {
    id: "mismatch",
    group: "Data",
    title: "Engine against trainer",
    hint: "Log-probabilities of one version, from both. Below 0.02 in bf16.",
    signal: "logprob_gap_mean",
    curves: [curve("mean gap", 4, "logprob_gap_mean")],
  },
  {
    id: "staleness",
    group: "Data",
    title: "Staleness",
    hint: "Versions between sampling and training. Never above eta.",
    curves: [curve("mean", 1, "staleness_mean"), curve("max", 2, "staleness_max")],
  },
  {
    id: "clip",
    group: "Learning",
    title: "Clipped tokens",
    hint: "0.1 to 20 %. Always 0: nothing is learned.",
    signal: "clip_fraction",
    curves: [curve("share", 3, "clip_fraction")],
    format: "share",
  },
  { id: "gradient", group: "Learning", title: "Gradient norm", hint: "Of one size; watch for spikes of ten times.", curves: [curve("norm", 5, "grad_norm")] },
  {
    id: "tokens",
    group: "Speed",
    title: "Tokens trained per second",
    hint: "Falls when replies grow, or when the trainer waits.",
    curves: [{ label: "tokens/s", color: "--series-1", of: ratio("trained_tokens", "seconds/total") }],
  },
  {
    id: "idle",
    group: "Speed",
    title: "Trainer idle",
    hint: "Above 70 %, rollout is the bottleneck.",
    signal: "idle_share",
    curves: [curve("share", 2, "idle_share")],
    format: "share",
  },
];
