/** The filters of the list of episodes: kept in the page's address, and sent to the admin API.
 *
 * Pure. An empty filter is left out of both, so equal filters have equal addresses.
 */

export interface Filters {
  text: string;
  task: string;
  group: string;
  agent: string;
  model: string;
  mode: string;
  state: string;
  reason: string;
  /** A number or a range: `3`, `3..5`, `3..`, `..5`. */
  version: string;
  reward: string;
  /** The number of the batch that trained the group. */
  batch: string;
  /** Empty: the newest first. */
  sort: string;
  /** Seconds since 1970, of the opening. */
  since: number | null;
  until: number | null;
}

export const NO_FILTERS: Filters = {
  text: "",
  task: "",
  group: "",
  agent: "",
  model: "",
  mode: "",
  state: "",
  reason: "",
  version: "",
  reward: "",
  batch: "",
  sort: "",
  since: null,
  until: null,
};

const WORDS = ["text", "task", "group", "agent", "model", "mode", "state", "reason", "version", "reward", "batch", "sort"] as const;
const TIMES = ["since", "until"] as const;

export function filtersOf(search: URLSearchParams): Filters {
  const found = { ...NO_FILTERS };
  for (const name of WORDS) found[name] = search.get(name) ?? "";
  for (const name of TIMES) {
    const value = Number(search.get(name) ?? NaN);
    found[name] = Number.isFinite(value) && value > 0 ? value : null;
  }
  return found;
}

/** The part of an address behind `?`; empty without filters. */
export function searchOf(filters: Filters): string {
  const search = new URLSearchParams();
  for (const name of WORDS) if (filters[name] !== "") search.set(name, filters[name]);
  for (const name of TIMES) if (filters[name] !== null) search.set(name, String(filters[name]));
  return search.toString();
}

/** A closed range of numbers; undefined: no bound. Null: the text is not a range. */
export function rangeOf(text: string): { min?: number; max?: number } | null {
  const trimmed = text.trim();
  if (trimmed === "") return {};
  const ends = trimmed.split("..");
  if (ends.length > 2) return null;
  const numbers = ends.map((end) => (end.trim() === "" ? undefined : Number(end)));
  if (numbers.some((n) => n !== undefined && !Number.isFinite(n))) return null;
  if (ends.length === 1) return { min: numbers[0]!, max: numbers[0]! };
  const [min, max] = numbers;
  if (min === undefined && max === undefined) return null;
  return { ...(min === undefined ? {} : { min }), ...(max === undefined ? {} : { max }) };
}

/** The parameters of the admin API for these filters. A range that is none is left out: the form marks it. */
export function apiParameters(filters: Filters): URLSearchParams {
  const search = new URLSearchParams();
  const plain: [keyof Filters, string][] = [
    ["text", "text"],
    ["task", "task_id"],
    ["group", "group_id"],
    ["agent", "agent"],
    ["model", "model"],
    ["mode", "mode"],
    ["state", "state"],
    ["reason", "reason"],
    ["sort", "sort"],
    ["since", "since"],
    ["until", "until"],
  ];
  for (const [name, parameter] of plain) {
    const value = filters[name];
    if (value !== "" && value !== null) search.set(parameter, String(value));
  }
  if (/^\d+$/.test(filters.batch)) search.set("batch", filters.batch);
  for (const name of ["version", "reward"] as const) {
    const range = rangeOf(filters[name]);
    if (range?.min !== undefined) search.set(`${name}_min`, String(range.min));
    if (range?.max !== undefined) search.set(`${name}_max`, String(range.max));
  }
  return search;
}
