/** Episodes: filters, a histogram over time, and a list of any length. */

import "../episodes/episodes.css";
import { useSignal, useSignalEffect } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";
import { get } from "../api";
import { FilterBar } from "../episodes/filter-bar";
import { HistogramBrush } from "../episodes/histogram-brush";
import { EpisodeList } from "../episodes/list";
import { apiParameters, filtersOf, searchOf, type Filters } from "../episodes/query";
import { EpisodeCells, EpisodeHeads } from "../episodes/row";
import type { Facets, Histogram, RunningCall } from "../episodes/types";
import { count } from "../episodes/words";
import { useShortcuts } from "../keys";
import { is, useEvents } from "../live";
import { useLoaded } from "../load";
import { Empty, Failure, Loading } from "../parts/notice";
import { VirtualList } from "../parts/virtual-list";
import { go, route, setQuery } from "../router";

const ROW = 70;

export function EpisodesView() {
  const filters = filtersOf(route.value.query);
  const search = searchOf(filters);
  const list = useMemo(() => new EpisodeList(filters), [search]);
  useEffect(() => () => list.stop(), [list]);
  const drawn = apiParameters({ ...filters, since: null, until: null, sort: "" });
  const histogram = useLoaded(
    (signal) => get<Histogram>("/admin/v1/episodes/histogram", { ...Object.fromEntries(drawn), bins: 120 }, signal),
    [drawn.toString()],
  );
  const facets = useLoaded((signal) => get<Facets>("/admin/v1/episodes/facets", { model: filters.model }, signal), [filters.model]);
  const frame = useLoaded((signal) => get<{ models: { name: string; trained: boolean }[] }>("/admin/v1/console", {}, signal), []);
  const speaking = useSpeaking();
  useEvents(
    (events) => {
      list.apply(events);
      if (events.some((event) => is(event, "episode.closed"))) later(histogram.again);
    },
    [list],
  );
  const change = (some: Partial<Filters>) => setQuery({ ...filters, ...some });
  useShortcuts([{ keys: "/", text: "Filter episodes", act: () => document.querySelector<HTMLInputElement>(".filters input")?.focus() }]);
  const models = (frame.value.value?.models ?? []).filter((model) => model.trained).map((model) => model.name);
  return (
    <>
      <h1 class="unseen">Episodes</h1>
      <FilterBar filters={filters} facets={facets.value.value} models={models} change={change} />
      <Failure text={histogram.error.value ?? facets.error.value} />
      {histogram.value.value && (
        <HistogramBrush histogram={histogram.value.value} since={filters.since} until={filters.until} choose={(since, until) => change({ since, until })} />
      )}
      <List list={list} speaking={speaking.value} filtered={searchOf({ ...filters, sort: "" }) !== ""} key={search} />
    </>
  );
}

let waiting = 0;

/** Events come in their hundreds: the histogram is fetched again every few seconds at most. */
function later(act: () => void): void {
  if (waiting) return;
  waiting = window.setTimeout(() => {
    waiting = 0;
    act();
  }, 3_000);
}

/** Tokens of the calls that run now, by episode. */
function useSpeaking() {
  const found = useSignal<Map<string, number>>(new Map());
  const calls = useLoaded((signal) => get<{ calls: RunningCall[] }>("/admin/v1/calls", {}, signal), [], 1_000);
  useSignalEffect(() => {
    const tokens = new Map<string, number>();
    for (const call of calls.value.value?.calls ?? []) tokens.set(call.episode_id, (tokens.get(call.episode_id) ?? 0) + call.tokens);
    if (tokens.size || found.peek().size) found.value = tokens;
  });
  return found;
}

function List({ list, speaking, filtered }: { list: EpisodeList; speaking: Map<string, number>; filtered: boolean }) {
  const chosen = useSignal(-1);
  void list.changes.value;
  const total = list.total.value;
  const open = (index: number) => {
    const row = list.row(index);
    if (row) go("episodes", row.episode_id);
  };
  if (total === null) return list.error.value ? <Failure text={list.error.value} /> : <Loading />;
  return (
    <>
      <p class="list-words" role="status">
        {filtered ? `${count(total, "episode")} ${total === 1 ? "matches" : "match"}` : count(total, "episode")}
        {list.fresh.value > 0 && !list.atTop && (
          <button type="button" onClick={() => void list.renew()}>
            {list.fresh.value.toLocaleString("en-US")} new: show
          </button>
        )}
      </p>
      <Failure text={list.error.value} />
      {total === 0 ? (
        <Empty>{filtered ? "No episode matches these filters." : "No episode yet: open one with POST /admin/v1/episodes, or start a run."}</Empty>
      ) : (
        <VirtualList
          class="episodes"
          label="Episodes"
          length={total}
          rowHeight={ROW}
          head={<EpisodeHeads />}
          row={(index) => <EpisodeCells row={list.row(index)} speaking={speaking} />}
          seen={(from, to) => list.seen(from, to)}
          chosen={chosen.value}
          choose={(index) => (chosen.value = index)}
          open={open}
        />
      )}
    </>
  );
}
