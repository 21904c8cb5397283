// What a view shows of the gateway: fetched, fetched again when something happened, or every few seconds.
import { useSignal, type ReadonlySignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { ApiError, messageOf } from "./api";

export interface Loaded<T> {
  value: ReadonlySignal<T | null>;
  /** The last failure in words; null once a response came. */
  error: ReadonlySignal<string | null>;
  /** Asks again, soon: many calls within a moment ask once. */
  again: () => void;
}

const SOON_MS = 400;
const AFTER_FAILURE_MS = 2_000;
/** A request that hangs would keep a view from ever asking again. */
const LATE_MS = 60_000;

/** True if the same request may succeed later: the gateway was not reached, restarts, or has too much to do. */
function passes(failure: unknown): boolean {
  return !(failure instanceof ApiError) || failure.status >= 500 || failure.status === 429;
}

/**
 * Asks when `deps` change, every `everyMs` (0: never) while the tab is seen, on `again()`, and soon after a failure that may pass.
 * Old responses stay until then.
 */
export function useLoaded<T>(ask: (signal: AbortSignal) => Promise<T>, deps: readonly unknown[], everyMs = 0): Loaded<T> {
  const value = useSignal<T | null>(null);
  const error = useSignal<string | null>(null);
  const again = useRef<() => void>(() => {});
  useEffect(() => {
    const gone = new AbortController();
    let busy = false;
    let wanted = false;
    let timer = 0;
    const run = async () => {
      if (busy) return void (wanted = true);
      busy = true;
      const late = new AbortController();
      const limit = setTimeout(() => late.abort(new Error(`The gateway has not responded for ${LATE_MS / 1000} s.`)), LATE_MS);
      try {
        value.value = await ask(AbortSignal.any([gone.signal, late.signal]));
        error.value = null;
      } catch (failure) {
        if (gone.signal.aborted) return;
        if (!(failure instanceof ApiError && failure.status === 401)) error.value = messageOf(failure);
        if (!everyMs && passes(failure)) soon(AFTER_FAILURE_MS);
      } finally {
        clearTimeout(limit);
        busy = false;
      }
      if (wanted) {
        wanted = false;
        again.current();
      }
    };
    const soon = (ms: number) => {
      if (!timer && !gone.signal.aborted)
        timer = window.setTimeout(() => {
          timer = 0;
          void run();
        }, ms);
    };
    again.current = () => soon(SOON_MS);
    void run();
    const clock = everyMs ? window.setInterval(() => document.hidden || void run(), everyMs) : 0;
    return () => {
      gone.abort();
      clearTimeout(timer);
      clearInterval(clock);
    };
  }, deps);
  return { value, error, again: () => again.current() };
}
