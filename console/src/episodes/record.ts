/** What the episode's page knows: the episode, its tokens and why it ended so; fetched again as it changes. */

import { useSignal, type ReadonlySignal } from "@preact/signals";
import { useMemo, useRef } from "preact/hooks";
import { get } from "../api";
import { is, useEvents } from "../live";
import { useLoaded, type Loaded } from "../load";
import { joined } from "./join";
import { tableOf, type TokensResponse, type TokenTable } from "./table";
import type { EpisodeResponse, EpisodePage, EpisodeRow, RunningCall, Why } from "./types";

/** Milliseconds between two looks at an episode that runs. */
const LIVE_MS = 1_000;

export interface EpisodeRecord {
  episode: Loaded<EpisodeResponse>;
  tokens: Loaded<TokensResponse | null>;
  table: TokenTable | null;
  why: Loaded<Why>;
  /** The episodes of its group for the same model. */
  group: Loaded<EpisodeRow[]>;
  running: RunningCall[];
  /** Another number with every event of the episode or its group. */
  changes: ReadonlySignal<number>;
}

export const pathOf = (id: string, what = "") => `/admin/v1/episodes/${encodeURIComponent(id)}${what}`;

export function useRecord(id: string, model: string): EpisodeRecord {
  const changes = useSignal(0);
  const live = useSignal(false);
  const episode = useLoaded(
    async (signal) => {
      const response = await get<EpisodeResponse>(pathOf(id), {}, signal);
      live.value = response.state !== "closed";
      return response;
    },
    [id, live.value],
    live.value ? LIVE_MS : 0,
  );
  const why = useLoaded((signal) => get<Why>(pathOf(id, "/why"), {}, signal), [id, changes.value]);
  const calls = useLoaded(
    async (signal) => (live.peek() ? (await get<{ calls: RunningCall[] }>("/admin/v1/calls", {}, signal)).calls : []),
    [id, live.value],
    live.value ? LIVE_MS : 0,
  );
  const tokens = useTokens(id, model, episode.value.value?.calls.length ?? null, live.value);
  const known = episode.value.value;
  const group = known?.group_id;
  const members = useLoaded<EpisodeRow[]>(
    async (signal) => (known ? (await get<EpisodePage>("/admin/v1/episodes", { group_id: known.group_id, model: known.model, calls: true, limit: 100 }, signal)).episodes : []),
    [group, known?.model, changes.value],
  );
  useEvents(
    (events) => {
      const own = events.some((event) => event.episode === id || (event.group !== undefined && event.group === group) || is(event, "gap"));
      if (!own) return;
      changes.value++;
      episode.again();
    },
    [id, group],
  );
  const table = useMemo(() => tokens.value.value && tableOf(tokens.value.value), [tokens.value.value]);
  const running = (calls.value.value ?? []).filter((call) => call.episode_id === id);
  return { episode, tokens, table, why, group: members, running, changes };
}

/** The tokens, fetched once the episode is known: until then it is not known whether they can still grow, and each change would fetch
 * them again. Of an episode that runs, only what came since is fetched; when it closes, all of it with the trainer's figures. */
function useTokens(id: string, model: string, turns: number | null, live: boolean): Loaded<TokensResponse | null> {
  const known = useRef<{ model: string; response: TokensResponse } | null>(null);
  return useLoaded<TokensResponse | null>(
    async (signal) => {
      if (turns === null) return null;
      const before = live && known.current?.model === model ? known.current.response : null;
      const from = before?.nodes.length ?? 0;
      const response = await get<TokensResponse>(pathOf(id, "/tokens"), { model, from_node: from || undefined }, signal);
      known.current = { model, response: before && from ? joined(before, response, from) : response };
      return known.current.response;
    },
    [id, model, turns, live],
  );
}
