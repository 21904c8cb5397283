/** An episode's calls in time, as lanes of bars and as a table. */

import { useMemo } from "preact/hooks";
import { Badge } from "../parts/badge";
import { Empty } from "../parts/notice";
import { Table, type Column } from "../parts/table";
import { href } from "../router";
import type { TokenTable } from "./table";
import { ticksOf, timelineOf, type Phase } from "./timeline";
import type { Call, EpisodeAnswer, RefusedCall } from "./types";
import { moment, number, seconds } from "./words";

const PHASES: [Phase, string][] = [
  ["waiting", "waiting for an engine"],
  ["prefill", "prefill"],
  ["sampling", "sampling"],
  ["tool", "agent and tools"],
];

interface Props {
  episode: EpisodeAnswer;
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
  if (!episode.calls.length) {
    return episode.refused_calls?.length ? <Refused calls={episode.refused_calls} /> : <Empty>No call was made in this episode.</Empty>;
  }
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
            </div>
          ))}
        </div>
      </section>
      <h2>Calls</h2>
      <Table caption="Calls" columns={columns(episode, table, apart)} rows={episode.calls} id={(call) => call.call_id} />
      <Refused calls={episode.refused_calls ?? []} />
    </>
  );
}

/** The calls that were refused before anything was sampled. */
function Refused({ calls }: { calls: RefusedCall[] }) {
  if (!calls.length) return null;
  return (
    <>
      <h2>Refused calls</h2>
      <Table
        caption="Refused calls"
        stacked
        rows={calls}
        id={(call) => `${call.at} ${call.message}`}
        columns={[
          { head: "at", cell: (call) => moment(call.at) },
          { head: "api", cell: (call) => call.api },
          { head: "model", cell: (call) => call.model || "–" },
          { head: "refused with", cell: (call) => <Badge tone="bad">{`${call.status} ${call.code}`}</Badge> },
          { head: "times", number: true, cell: (call) => call.times },
          { head: "message", cell: (call) => call.message },
        ]}
      />
    </>
  );
}

/** The tokens of a reply that arrived in less time arrived together, and have no rate. */
const SHORTEST_S = 0.005;

function columns(episode: EpisodeAnswer, table: TokenTable | null, apart: boolean): Column<Call>[] {
  const first = (call: Call) => (call.first_token_s === null ? null : call.first_token_s - (call.queued_s ?? 0));
  const sampling = (call: Call) => call.seconds - (call.first_token_s ?? 0);
  const node = (call: Call) => (call.model === table?.model ? table?.nodes[call.node] : undefined);
  const several = new Set(episode.calls.map((call) => call.model)).size > 1;
  return [
    { head: "began", cell: (call) => moment(call.received_at) },
    {
      head: "call",
      cell: (call) => {
        const at = node(call);
        return at ? <a href={href("episodes", episode.episode_id, { view: "tokens", token: at.start })}>{call.call_id}</a> : call.call_id;
      },
    },
    ...(several ? [{ head: "model", cell: (call: Call) => call.model }] : []),
    { head: "api", cell: (call) => call.api + (call.stream ? ", streamed" : "") },
    { head: "engine", cell: (call) => call.engine || "–" },
    ...(apart ? [{ head: "waited", number: true, cell: (call: Call) => seconds(call.queued_s ?? 0) }] : []),
    { head: apart ? "prefill" : "to first token", number: true, cell: (call) => (first(call) === null ? "–" : seconds(first(call)!)) },
    { head: "in all", number: true, cell: (call) => seconds(call.seconds) },
    { head: "tokens in", number: true, cell: (call) => call.prompt_tokens.toLocaleString("en-US") },
    { head: "out", number: true, cell: (call) => call.completion_tokens.toLocaleString("en-US") },
    { head: "tokens/s", number: true, cell: (call) => (sampling(call) < SHORTEST_S ? "–" : number(call.completion_tokens / sampling(call), 3)) },
    { head: "pauses", number: true, cell: (call) => call.pauses || "" },
    {
      head: "ended",
      cell: (call) => (
        <>
          {call.finish_reason.replaceAll("_", " ")} {call.finish_reason === "length" && <Badge tone="warn">cut</Badge>}
          {call.tool_faults && <Badge tone="bad">{call.tool_faults.replaceAll("_", " ")}</Badge>}
        </>
      ),
    },
    { head: "reward", number: true, cell: (call) => (call.reward === null ? "" : number(call.reward)) },
  ];
}
