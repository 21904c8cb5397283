// One stream of events for the whole tab; views listen to it. Listeners get events in batches, once a frame at most.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { session } from "./api";
import { watch, type State } from "./stream";

export interface GatewayEvent {
  id: number;
  at: number;
  kind: string;
  model?: string;
  episode?: string;
  group?: string;
  data: Record<string, unknown>;
}

type Listener = (events: GatewayEvent[]) => void;

export const streamState = signal<State>("ended");
/** The time of the newest event, in seconds since 1970. */
export const newest = signal<number | null>(null);

const listeners = new Set<Listener>();
let stop: AbortController | null = null;
let waiting: GatewayEvent[] = [];

function deliver(): void {
  const events = waiting;
  waiting = [];
  newest.value = events[events.length - 1]!.at;
  for (const listener of listeners) listener(events);
}

function start(): void {
  stop?.abort();
  stop = new AbortController();
  const { signal: aborted } = stop;
  const receive = (messages: { data: string }[]) => {
    if (!waiting.length) setTimeout(deliver, 16);
    waiting.push(...messages.map((message) => JSON.parse(message.data) as GatewayEvent));
  };
  void watch("/admin/v1/events", {}, aborted, receive, (state) => {
    if (!aborted.aborted) streamState.value = state;
  });
}

let heard = -1;

/** Calls `listener` with what happens from now on. After a `gap` event, what a view knows may be old: load it again. */
export function listen(listener: Listener): () => void {
  if (!stop || heard !== session.value) {
    heard = session.value;
    start();
  }
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** `listen`, for as long as the component is there. `listener` must not change, or come with `deps`. */
export function useEvents(listener: Listener, deps: readonly unknown[] = []): void {
  useEffect(() => listen(listener), [...deps, session.value]);
}

/** True if an event is of one of these subjects ("episode") or kinds ("episode.closed"). */
export function is(event: GatewayEvent, ...kinds: string[]): boolean {
  return kinds.some((kind) => event.kind === kind || event.kind.startsWith(`${kind}.`));
}
