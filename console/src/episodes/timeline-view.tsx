/** An episode's calls in time, as lanes of bars and as a table. */

import type { ComponentChildren } from "preact";
import { useMemo } from "preact/hooks";
import { Badge } from "../parts/badge";
import { Empty } from "../parts/notice";
import { Table, type Column } from "../parts/table";
import { href } from "../router";
import type { TokenTable } from "./table";
import { ticksOf, timelineOf, type Phase } from "./timeline";
import type { Call, EpisodeResponse, RefusedCall } from "./types";
import { moment, number, seconds } from "./words";

const PHASES: [Phase, string][] = [
  ["waiting", "waiting for an engine"],
  ["prefill", "prefill"],
  ["sampling", "sampling"],
  ["tool", "agent and tools"],
];

interface Props {
  episode: EpisodeResponse;
  table: TokenTable | null;
  now: number;
}

export function TimelineView({ episode, table, now }: Props) {
  const timeline = useMemo(() => {
    const calls = episode.calls.map((call) => ({
      ...call,
      queued_s: call.queued_s ?? null,
      lineage: call.model === table?.model ? (table?.nodes[call.node]?.lineage ?? null) : null,
    }));
    return timelineOf(calls, episode.created_at, episode.closed_at ?? now);
  }, [episode, table, now]);
  const refused = episode.refused_calls ?? [];
  if (!episode.calls.length && !refused.length) return <Empty>No call was made in this episode.</Empty>;
  const rows: Row[] = [...episode.calls, ...refused].sort((a, b) => beginOf(a) - beginOf(b));
  const place = (at: number) => `${(at / Math.max(timeline.seconds, 1e-9)) * 100}%`;
  const apart = episode.calls.some((call) => call.queued_s != null);
  const summary = PHASES.map(([phase, words]) => `${words} ${seconds(timeline.totals[phase])}`).join(", ");
  return (
    <>
      <section class="panel timeline" aria-label="Timeline">
        <p class="timeline-words">
          {PHASES.filter(([phase]) => apart || phase !== "waiting").map(([phase, words]) => (
            <span key={phase} class={`key p-${phase}`}>
              {phase === "prefill" && !apart ? "waiting and prefill" : words}: <b>{seconds(timeline.totals[phase])}</b>
            </span>
          ))}
          <span>{seconds(timeline.seconds)} in all</span>
        </p>
        <div class="lanes" role="img" aria-label={summary}>
          {ticksOf(timeline.seconds).map((tick) => (
            <div key={tick} class="tick" style={{ left: place(tick) }}>
              <span>{tick > timeline.seconds * 0.88 ? "" : tick ? seconds(tick) : "0"}</span>
            </div>
          ))}
          {Array.from({ length: timeline.lanes }, (_, lane) => (
            <div key={lane} class="lane">
              {timeline.bars
                .filter((bar) => bar.lane === lane)
                .map((bar) => (
                  <div
                    key={bar.call_id + bar.phase}
                    class={`bar p-${bar.phase}`}
                    style={{ left: place(bar.from), width: place(bar.to - bar.from) }}
                    title={`${bar.phase === "tool" ? "agent and tools" : `${bar.phase} of ${bar.call_id}`}: ${seconds(bar.to - bar.from)}`}
                  />
                ))}
              {lane === 0 &&
                refused.map((call) => (
                  <div
                    key={`${call.at} ${call.message}`}
                    class="bar p-refused"
                    style={{ left: place(Math.max(call.at - episode.created_at, 0)) }}
                    title={`refused: ${call.status} ${call.code}`}
                  />
                ))}
            </div>
          ))}
        </div>
      </section>
      <h2>Calls</h2>
      <Table caption="Calls" columns={columns(episode, table, apart)} rows={rows} id={(row) => (isRefused(row) ? `${row.at} ${row.message}` : row.call_id)} />
    </>
  );
}

/** The tokens of a reply that arrived in less time arrived together, and have no rate. */
const SHORTEST_S = 0.005;

/** A call, or one that was refused before anything was sampled. */
type Row = Call | RefusedCall;
const isRefused = (row: Row): row is RefusedCall => "status" in row;
const beginOf = (row: Row) => (isRefused(row) ? row.at : row.received_at);
const answered =
  (cell: (call: Call) => ComponentChildren) =>
  (row: Row): ComponentChildren =>
    isRefused(row) ? "" : cell(row);

function columns(episode: EpisodeResponse, table: TokenTable | null, apart: boolean): Column<Row>[] {
  const first = (call: Call) => (call.first_token_s === null ? null : call.first_token_s - (call.queued_s ?? 0));
  const sampling = (call: Call) => call.seconds - (call.first_token_s ?? 0);
  const node = (call: Call) => (call.model === table?.model ? table?.nodes[call.node] : undefined);
  const several = new Set(episode.calls.map((call) => call.model)).size > 1;
  return [
    { head: "began", cell: (row) => moment(beginOf(row)) },
    {
      head: "call",
      cell: (row) => {
        if (isRefused(row)) return <Badge tone="bad">{`refused: ${row.status} ${row.code}`}</Badge>;
        const at = node(row);
        return at ? <a href={href("episodes", episode.episode_id, { view: "tokens", token: at.start })}>{row.call_id}</a> : row.call_id;
      },
    },
    ...(several ? [{ head: "model", cell: (row: Row) => row.model }] : []),
    { head: "api", cell: (row) => row.api + (!isRefused(row) && row.stream ? ", streamed" : "") },
    { head: "engine", cell: answered((call) => <span class="together">{call.engine || "–"}</span>) },
    ...(apart ? [{ head: "waited", number: true, cell: answered((call) => seconds(call.queued_s ?? 0)) }] : []),
    { head: apart ? "prefill" : "to first token", number: true, cell: answered((call) => (first(call) === null ? "–" : seconds(first(call)!))) },
    { head: "in all", number: true, cell: answered((call) => seconds(call.seconds)) },
    { head: "tokens in", number: true, cell: answered((call) => call.prompt_tokens.toLocaleString("en-US")) },
    { head: "out", number: true, cell: answered((call) => call.completion_tokens.toLocaleString("en-US")) },
    { head: "tokens/s", number: true, cell: answered((call) => (sampling(call) < SHORTEST_S ? "–" : number(call.completion_tokens / sampling(call), 3))) },
    { head: "pauses", number: true, cell: answered((call) => call.pauses || "") },
    {
      head: "ended",
      cell: (row) =>
        isRefused(row) ? (
          <span class="error">
            {row.message}
            {row.times > 1 && ` (${row.times} times)`}
          </span>
        ) : (
          <>
            {row.finish_reason.replaceAll("_", " ")} {row.finish_reason === "length" && <Badge tone="warn">cut</Badge>}
            {row.tool_faults && <Badge tone="bad">{row.tool_faults.replaceAll("_", " ")}</Badge>}
          </>
        ),
    },
    { head: "reward", number: true, cell: answered((call) => (call.reward === null ? "" : number(call.reward))) },
  ];
}
