/** What the admin API returns about episodes, as far as the views read it. */

export interface EpisodeRow {
  episode_id: string;
  task_id: string;
  group_id: string;
  mode: "train" | "eval";
  model: string;
  version: number;
  state: "open" | "grading" | "closed";
  reason: string;
  reward: number | null;
  components: Record<string, number> | null;
  details: Record<string, unknown>;
  created_at: number;
  closed_at: number | null;
  agent: string;
  notice: string;
  error: string;
  /** With `calls=true`. */
  calls?: number;
  sampled_tokens?: number;
  truncated?: number;
  /** With `preview=true`. */
  group?: GroupRewards | null;
  prompt_end?: string;
  reply_start?: string;
}

/** The rewards of a group: how many, and their population standard deviation. */
export interface GroupRewards {
  rewards: number;
  mean: number;
  std: number;
}

export interface EpisodePage {
  episodes: EpisodeRow[];
  next: string | null;
  total?: number;
  pin?: string;
}

export interface Histogram {
  from: number | null;
  to: number | null;
  bin_s: number;
  counts: number[];
  closed: number[];
  rewarded: number[];
  reward_mean: (number | null)[];
}

export interface Facets {
  reasons: Record<string, number>;
  states: Record<string, number>;
  modes: Record<string, number>;
  agents: string[];
  versions: number[];
}

export interface Call {
  call_id: string;
  model: string;
  node: number;
  api: string;
  stream: boolean;
  requested: Record<string, unknown>;
  used: Record<string, unknown>;
  engine: string;
  finish_reason: string;
  prompt_tokens: number;
  completion_tokens: number;
  pauses: number;
  received_at: number;
  queued_s?: number | null;
  first_token_s: number | null;
  seconds: number;
  reward: number | null;
  tool_faults: string | null;
}

/** A call that was refused before anything was sampled; `times` equal ones in a row. */
export interface RefusedCall {
  at: number;
  api: string;
  model: string;
  status: number;
  code: string;
  message: string;
  times: number;
}

export type EpisodeResponse = Omit<EpisodeRow, "calls" | "group"> & { calls: Call[]; refused_calls?: RefusedCall[] };

/** A call that runs now. */
export interface RunningCall {
  call_id: string;
  episode_id: string;
  model: string;
  engine: string | null;
  tokens: number;
}

export interface Step {
  at: number;
  about: "episode" | "group" | "call";
  kind: string;
  reason: string;
  batch: number | null;
  entry: number | null;
  words: string;
}

export interface Why {
  episode_id: string;
  group_id: string;
  model: string;
  agent: string;
  notice: string;
  notice_words: string;
  error: string;
  verdict: string;
  sampled_tokens: number;
  masked_tokens: Record<string, number>;
  tool_faults: { call_id: string; faults: string[]; words: string[] }[];
  story: Step[];
}
