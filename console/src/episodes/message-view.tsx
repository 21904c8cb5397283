/** A conversation as people read it: prose as prose, tool calls as calls, what is long folded, and refused calls where they came. */

import { useMemo } from "preact/hooks";
import { Badge } from "../parts/badge";
import { Empty } from "../parts/notice";
import { MessageHead } from "./conversation";
import { visible } from "./lines";
import { foldedAs, partsOf, type Part } from "./message-parts";
import { messagesOf, textOf, withRefusals } from "./messages";
import type { TokenTable } from "./table";
import { pathTo } from "./tree";
import type { Call, EpisodeResponse, RefusedCall } from "./types";
import { moment } from "./words";

interface Props {
  table: TokenTable;
  /** The nodes at which its conversations end: with one of them, there is no summary between. */
  story: readonly number[];
  episode: Pick<EpisodeResponse, "calls" | "refused_calls" | "state">;
  /** Only what comes before the first reply: members of a group have it in common. */
  prompt?: boolean;
}

export function MessageView({ table, story, episode, prompt = false }: Props) {
  const [rows, seams] = useMemo(() => {
    const parts = story.map((leaf) => messagesOf(table, pathTo(table.nodes, leaf)));
    const all = parts.flat();
    const seams = new Set(parts.slice(1).map((part) => part[0]));
    const first = all.findIndex((message) => message.sampled > 0);
    const shown = (first < 0 ? all : all.slice(0, first)).map((message) => ({ message }));
    return [prompt ? shown : withRefusals(all, episode.refused_calls ?? [], (turn) => timeOf(episode.calls, table.model, turn)), seams];
  }, [table, story.join(), episode, prompt]);
  if (!rows.length) return <Empty>{episode.state === "closed" ? "Nothing was sampled in this episode." : "Nothing was sampled in this episode yet."}</Empty>;
  return (
    <ol class="messages">
      {rows.map((row, i) =>
        "refused" in row ? (
          <Refused key={i} call={row.refused} />
        ) : (
          <li key={i} class={`message m-${row.message.role}`}>
            <p class="message-head">
              <MessageHead table={table} message={row.message} />
              {seams.has(row.message) && <Badge tone="info">the history was summarized: from here on the model receives this</Badge>}
            </p>
            {partsOf(textOf(table, row.message)).map((part, at) => (
              <Shown key={at} part={part} />
            ))}
          </li>
        ),
      )}
    </ol>
  );
}

const timeOf = (calls: readonly Call[], model: string, turn: number) =>
  calls.find((call) => call.node === turn && call.model === model)?.received_at ?? null;

function Refused({ call }: { call: RefusedCall }) {
  return (
    <li class="message m-refused">
      <p class="message-head">
        <Badge tone="bad">
          refused: {call.status} {call.code}
        </Badge>
        {call.times > 1 && <span>{call.times} times</span>}
        <span class="quiet">
          {moment(call.at)}, {call.api}
        </span>
      </p>
      <p class="error">{visible(call.message)}</p>
    </li>
  );
}

function Shown({ part }: { part: Part }) {
  const text = visible(part.text);
  const folded = foldedAs(part);
  const body = part.kind === "text" || part.kind === "reasoning" ? <p class="prose" dir="auto">{text}</p> : <pre tabIndex={0}>{text}</pre>;
  const shown = folded === null ? body : (
    <details>
      <summary dir="auto">{visible(folded)}</summary>
      {body}
    </details>
  );
  if (part.kind !== "call") return shown;
  return (
    <div class="tool-call">
      <p>
        <Badge tone="info">calls</Badge> <code>{part.name ? visible(part.name) : "a tool, in a form that was not understood"}</code>
      </p>
      {shown}
    </div>
  );
}
