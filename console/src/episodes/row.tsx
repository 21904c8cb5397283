/** A row of the list of episodes. Its links are not stops of the Tab key: Enter opens the chosen row. */

import { Badge, type Tone } from "../parts/badge";
import { href } from "../router";
import { advantageOf, advantageWords } from "./advantage";
import { visible } from "./lines";
import { replyOf, lastLine, questionOf } from "./preview";
import type { EpisodeRow } from "./types";
import { moment, number, seconds } from "./words";

const HEADS: [cls: string, words: string][] = [
  ["at", "opened"],
  ["task", "task"],
  ["group", "group"],
  ["version", "version"],
  ["state", "state"],
  ["reward", "reward"],
  ["advantage", "advantage"],
  ["calls", "calls"],
  ["tokens", "tokens"],
  ["took", "took"],
  ["id", "episode"],
  ["preview", "question → answer, or the error"],
];

export function EpisodeHeads() {
  return (
    <>
      {HEADS.map(([cls, words]) => (
        <span key={cls} role="columnheader" class={`cell c-${cls}`}>
          {words}
        </span>
      ))}
    </>
  );
}

export function stateTone(row: Pick<EpisodeRow, "state" | "reason">): Tone {
  if (row.state !== "closed") return "info";
  return row.reason === "rewarded" ? "good" : "warn";
}

export function stateWords(row: Pick<EpisodeRow, "state" | "reason">): string {
  return row.state === "closed" ? row.reason.replaceAll("_", " ") || "closed" : row.state;
}

export function EpisodeCells({ row, speaking }: { row: EpisodeRow | undefined; speaking: Map<string, number> }) {
  if (!row)
    return (
      <span role="gridcell" class="cell quiet">
        …
      </span>
    );
  const now = row.state === "closed" ? undefined : speaking.get(row.episode_id);
  const tokens = (row.sampled_tokens ?? 0) + (now ?? 0);
  return (
    <>
      <span role="gridcell" class="cell c-at">{moment(row.created_at)}</span>
      <span role="gridcell" class="cell c-task" title={row.task_id}>
        <a tabIndex={-1} href={href("episodes", row.episode_id)}>{row.task_id}</a>
        {row.agent && <span class="quiet"> · {row.agent}</span>}
      </span>
      <span role="gridcell" class="cell c-group" title={row.group_id}>
        <a tabIndex={-1} href={href("episodes", { group: row.group_id })}>{row.group_id}</a>
      </span>
      <span role="gridcell" class="cell c-version">{row.version}</span>
      <span role="gridcell" class="cell c-state">
        <Badge tone={stateTone(row)}>{stateWords(row)}</Badge>
        {row.mode === "eval" && <Badge>eval</Badge>}
      </span>
      <span role="gridcell" class="cell c-reward">{number(row.reward)}</span>
      <span role="gridcell" class="cell c-advantage">{advantageWords(advantageOf(row, row.group))}</span>
      <span role="gridcell" class="cell c-calls">{row.calls ?? ""}</span>
      <span role="gridcell" class={now === undefined ? "cell c-tokens" : "cell c-tokens speaking"}>
        {tokens ? tokens.toLocaleString("en-US") : now === undefined ? "–" : "…"}
        {row.truncated ? <span title="A reply was cut at its token limit"> ✂</span> : null}
      </span>
      <span role="gridcell" class="cell c-took">{row.closed_at === null ? "" : seconds(row.closed_at - row.created_at)}</span>
      <span role="rowheader" class="cell c-id">
        <a tabIndex={-1} href={href("episodes", row.episode_id)}>{row.episode_id}</a>
      </span>
      <Preview row={row} />
    </>
  );
}

function Preview({ row }: { row: EpisodeRow }) {
  const question = visible(questionOf(row.prompt_end ?? ""));
  const answer = visible(replyOf(row.reply_start ?? ""));
  const error = visible(lastLine(row.error));
  return (
    <span role="gridcell" class="cell c-preview" title={error || `${question} → ${answer}`}>
      {error ? <span class="error">{error}</span> : <bdi>{question}</bdi>}
      {!error && answer && <bdi> → {answer}</bdi>}
    </span>
  );
}
