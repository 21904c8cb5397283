// The address of a view is in the hash: `#/episodes/ep-1?group=g-7`. Reloading and sharing keep it, and the server knows one page.
import { signal } from "@preact/signals";

export interface Route {
  /** The parts of the path: ["episodes", "ep-1"]. */
  path: string[];
  query: URLSearchParams;
}

export function parse(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  return { path: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

/** The hash of a view: `href("episodes", id)`, `href("episodes", { group: "g" })`. Empty values are left out. */
export function href(...parts: (string | Record<string, string | number | undefined | null>)[]): string {
  const path = parts.filter((part) => typeof part === "string").map(encodeURIComponent).join("/");
  const query = new URLSearchParams();
  for (const part of parts)
    if (typeof part === "object")
      for (const [name, value] of Object.entries(part)) if (value != null && value !== "") query.set(name, String(value));
  return `#/${path}${query.size ? `?${query}` : ""}`;
}

export const route = signal<Route>(parse(location.hash));

addEventListener("hashchange", () => (route.value = parse(location.hash)));

export function go(...parts: Parameters<typeof href>): void {
  location.hash = href(...parts);
}

/** Changes the query of the present view without a new entry in the history: for filters that are typed. */
export function setQuery(changes: Record<string, string | number | undefined | null>): void {
  const query = { ...Object.fromEntries(route.value.query), ...changes };
  history.replaceState(null, "", href(...route.value.path, query));
  route.value = parse(location.hash);
}
