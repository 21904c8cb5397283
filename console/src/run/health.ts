// The checklist of a run as the gateway judges it: Health shows all of it, and Run shows a chart's part.
import { get } from "../api";

export type State = "ok" | "warn" | "bad" | "unknown";

export interface Signal {
  name: string;
  label: string;
  value: number | null;
  unit: string;
  state: State;
  healthy: string;
  /** The largest healthy value. */
  most: number;
  /** The present value, and what it is of; why it is not known. */
  words: string;
  do: string;
  link: { view: string; query: Record<string, string> } | null;
  /** The newest value of a step of the run, judged in the same way. */
  in_step: { figure: string; value: number; step: number; state: Exclude<State, "unknown"> } | null;
}

export interface Health {
  /** Now; of a recorded run, its last event. */
  at: number;
  signals: Signal[];
  /** What limits the run, and what would help, in one line. */
  limits: { line: string };
}

/** `run`: whose steps are judged; the newest, if none is named. */
export function loadHealth(model: string | undefined, run: string | undefined, signal: AbortSignal): Promise<Health> {
  return get<Health>("/admin/v1/health", { model, run }, signal);
}
