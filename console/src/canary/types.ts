// The trials of versions on a share of the new conversations, as the gateway describes them.
export interface Arm {
  conversations: number;
  rewarded: number;
  reward_mean: number | null;
  reward_low: number;
  reward_high: number;
  faulty_share: number | null;
  refused_share: number | null;
  tokens_mean: number | null;
  seconds_per_token: number | null;
}

export interface Trial {
  version: number;
  live: number;
  share: number;
  conversations: number;
  low: number;
  high: number;
  began_at: number;
  ended_at: number | null;
  held: boolean;
  outcome: "" | "promoted" | "returned";
  why: string;
  figures: { candidate: Arm; live: Arm } | null;
}

export interface TrialEngine {
  name: string;
  state: string;
  version: number;
  streams: number;
}

/** A conversation that has ended. */
export interface Counted {
  episode_id: string;
  arm: "candidate" | "live";
  reward: number | null;
  at: number;
}

export interface Canary {
  model: string;
  /** Of the new conversations; 0: versions are not tried. */
  share: number;
  conversations: number;
  running: (Trial & { engines: TrialEngine[]; newest: Counted[] }) | null;
  ended: Trial[];
}

export interface ArmRow extends Arm {
  name: string;
  version: number;
}

/** Both versions of a trial, the candidate first. */
export function armsOf(trial: Trial): ArmRow[] {
  if (!trial.figures) return [];
  return [
    { name: "candidate", version: trial.version, ...trial.figures.candidate },
    { name: "live", version: trial.live, ...trial.figures.live },
  ];
}

/** Where a value stands between the least and the greatest reward, from 0 to 1. */
export function placeOf(value: number, trial: Trial): number {
  return Math.min(1, Math.max(0, (value - trial.low) / (trial.high - trial.low)));
}
