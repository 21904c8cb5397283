// The settings and logs of a run as the gateway has them, and what of them a view shows. Pure, but for the requests.
import { get } from "../api";
import { visible } from "../episodes/lines";

export interface Setting {
  /** "table.key". */
  name: string;
  value: unknown;
  default: unknown;
  changed: boolean;
}

export interface Program {
  program: string;
  settings: Setting[];
  /** When the program wrote them; null: it runs with them now. */
  at: number | null;
  path: string | null;
  /** Why there are none. */
  why: string;
}

export interface Log {
  path: string;
  bytes: number;
  changed_at: number;
}

export interface Logs {
  logs: Log[];
  missing: { program: string; why: string }[];
}

/** How much of a log's end is loaded. */
export const TAIL_BYTES = 256 * 1024;

export const loadSettings = (signal: AbortSignal) => get<{ programs: Program[] }>("/admin/v1/settings", {}, signal);
export const loadLogs = (signal: AbortSignal) => get<Logs>("/admin/v1/logs", {}, signal);
export const loadTail = (log: string, signal: AbortSignal) => get<Log & { text: string }>("/admin/v1/logs/tail", { log, limit: TAIL_BYTES }, signal);

/** A value as in a TOML file; "none" for one that is absent. */
export function shownValue(value: unknown): string {
  if (value === null || value === undefined) return "none";
  return visible(typeof value === "string" ? value : JSON.stringify(value));
}

/** The settings whose name or value contains the text, whatever its case; without `all` those that differ from the defaults. */
export function chosen(settings: readonly Setting[], text: string, all: boolean): Setting[] {
  const wanted = text.trim().toLowerCase();
  return settings.filter((one) => (all || one.changed) && `${one.name} ${shownValue(one.value)}`.toLowerCase().includes(wanted));
}

/** The lines of a log that contain the text, whatever its case. */
export function linesWith(log: string, text: string): string[] {
  const wanted = text.trim().toLowerCase();
  const lines = visible(log).replace(/\n$/, "").split("\n");
  return wanted ? lines.filter((line) => line.toLowerCase().includes(wanted)) : lines;
}
