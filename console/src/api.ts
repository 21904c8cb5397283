// The admin API. The key is kept in this module's memory alone: a reload of the tab asks for it again.
import { signal } from "@preact/signals";

export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly code: string,
  ) {
    super(message);
  }
}

/** Why a key is needed; null: none is, or one that works was given. */
export const asking = signal<string | null>(null);
/** Counts the keys that were given: views begin again with each. */
export const session = signal(0);

let key = "";

export function giveKey(given: string): void {
  key = given.trim();
  asking.value = null;
  session.value += 1;
}

export type Params = Record<string, string | number | boolean | readonly string[] | undefined | null>;

/** The address of a path of the gateway, wherever a proxy puts it: the page is at `.../console/`. */
export function address(path: string, params: Params = {}): string {
  const url = new URL(`..${path}`, document.baseURI.replace(/[?#].*$/, ""));
  for (const [name, value] of Object.entries(params))
    for (const one of Array.isArray(value) ? value : [value])
      if (one !== undefined && one !== null && one !== "") url.searchParams.append(name, String(one));
  return url.href;
}

/** A request with the key. Throws ApiError with the gateway's own words; a refused key makes the page ask for another. */
export async function request(path: string, params: Params = {}, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  const used = key;
  const response = await fetch(address(path, params), { ...init, headers, cache: "no-cache", credentials: "omit" });
  if (response.ok) return response;
  const error = await refusal(response);
  if (response.status === 401 && used === key) asking.value = key ? "The gateway refuses this key." : "";
  throw error;
}

async function refusal(response: Response): Promise<ApiError> {
  let message = `${response.status} ${response.statusText}`;
  let code = "";
  try {
    const { error } = (await response.json()) as { error: { message: string; code?: string } };
    message = error.message;
    code = error.code ?? "";
  } catch {
    // a proxy's own page
  }
  return new ApiError(message, response.status, code);
}

export async function get<T>(path: string, params: Params = {}, signal?: AbortSignal): Promise<T> {
  return (await (await request(path, params, { signal: signal ?? null })).json()) as T;
}

export async function post<T>(path: string, body: unknown = {}, params: Params = {}): Promise<T> {
  const headers = { "Content-Type": "application/json" };
  return (await (await request(path, params, { method: "POST", body: JSON.stringify(body), headers })).json()) as T;
}

export async function remove<T>(path: string, params: Params = {}): Promise<T> {
  return (await (await request(path, params, { method: "DELETE" })).json()) as T;
}

/** The text of an error for people. */
export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
