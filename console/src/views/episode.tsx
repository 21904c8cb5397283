/** One episode: as conversation, in time, as token tree, next to its group, and why it ended so. */

import "../episodes/episodes.css";
import { useSignal } from "@preact/signals";
import { useEffect, useMemo } from "preact/hooks";
import { address } from "../api";
import { advantageOf, advantageWords, groupRewardsOf } from "../episodes/advantage";
import { ColorBar } from "../episodes/color-bar";
import { Conversation } from "../episodes/conversation";
import { CopyButton } from "../episodes/copy";
import { curlOf, jsonOf } from "../episodes/curl";
import { GroupView } from "../episodes/group-view";
import { visible } from "../episodes/lines";
import { MessageView } from "../episodes/message-view";
import { lastLine } from "../episodes/preview";
import { pathOf, useRecord, type EpisodeRecord } from "../episodes/record";
import { stateTone, stateWords } from "../episodes/row";
import { coloringOf, MODES, type Mode } from "../episodes/scale";
import type { TokenTable } from "../episodes/table";
import { Tabs } from "../episodes/tabs";
import { TimelineView } from "../episodes/timeline-view";
import { TokenPanel } from "../episodes/token-panel";
import { TokenTree } from "../episodes/token-tree";
import { longestStory, storiesOf } from "../episodes/story";
import type { EpisodeResponse } from "../episodes/types";
import { WhyView, Words } from "../episodes/why-view";
import { count, moment, number, seconds } from "../episodes/words";
import { useShortcuts } from "../keys";
import { Badge } from "../parts/badge";
import { Empty, Failure, Loading } from "../parts/notice";
import { href, route, setQuery } from "../router";

const VIEWS = ["conversation", "timeline", "tokens", "group", "why"] as const;
type View = (typeof VIEWS)[number];

export function EpisodeView({ id }: { id: string }) {
  const query = route.value.query;
  const mode = one(MODES, query.get("color"));
  const record = useRecord(id, query.get("model") ?? "");
  useShortcuts([
    ...VIEWS.map((name, i) => ({ keys: String(i + 1), text: `Episode: ${name}`, act: () => setQuery({ view: name }) })),
    { keys: "c", text: "Episode: color by the next figure", act: () => setQuery({ color: MODES[(MODES.indexOf(modeNow()) + 1) % MODES.length] }) },
  ]);
  const episode = record.episode.value.value;
  if (!episode) return record.episode.error.value ? <Failure text={record.episode.error.value} /> : <Loading />;
  const view = one(VIEWS, query.get("view") ?? (episode.state === "closed" && !sampledOf(episode) ? "why" : null));
  return (
    <>
      <Head id={id} episode={episode} record={record} />
      <Failure text={record.episode.error.value ?? record.tokens.error.value} />
      <Tabs names={VIEWS} chosen={view} choose={(name) => setQuery({ view: name })} label="Views of the episode">
        {view === "timeline" && <TimelineView episode={episode} table={record.table} now={Date.now() / 1000} />}
        {view === "why" && (record.why.value.value ? <WhyView why={record.why.value.value} /> : <Waiting text={record.why.error.value} />)}
        {view !== "timeline" && view !== "why" && (
          record.table ? <Tokens record={record} episode={episode} table={record.table} view={view} mode={mode} /> : <Waiting text={record.tokens.error.value} />
        )}
      </Tabs>
    </>
  );
}

const sampledOf = (episode: EpisodeResponse) => episode.calls.reduce((sum, call) => sum + call.completion_tokens, 0);

const modeNow = () => one(MODES, route.value.query.get("color"));

function one<T extends string>(of: readonly T[], name: string | null): T {
  return of.find((known) => known === name) ?? of[0]!;
}

function Waiting({ text }: { text: string | null }) {
  return text ? <Failure text={text} /> : <Loading />;
}

function Head({ id, episode, record }: { id: string; episode: EpisodeResponse; record: EpisodeRecord }) {
  const sampled = sampledOf(episode);
  const advantage = advantageOf(episode, groupRewardsOf(record.group.value.value ?? []));
  const refused = (episode.refused_calls ?? []).reduce((sum, call) => sum + call.times, 0);
  const ended = episode.closed_at ?? Date.now() / 1000;
  const speaking = record.running.reduce((sum, call) => sum + call.tokens, 0);
  const json = () => jsonOf(episode, { why: record.why.value.peek(), trajectory: record.tokens.value.peek() });
  const why = record.why.value.value;
  return (
    <div class="episode-head">
      <h1>
        <span class="mono">{id}</span> <Badge tone={stateTone(episode)}>{stateWords(episode)}</Badge>{" "}
        {episode.mode === "eval" && <Badge>eval</Badge>} <span class="reward">reward {number(episode.reward)}</span>
        {advantage !== null && (
          <span class="reward" title="Standard deviations above the mean reward of its group; Dr. GRPO and RLOO use another scale">
            advantage {advantageWords(advantage)}
          </span>
        )}
      </h1>
      <div class="episode-copy">
        <CopyButton label="Copy as curl" title="The command that reads this record" text={() => curlOf(address(pathOf(id, "/tokens")))} />
        <CopyButton label="Copy as JSON" title="The episode, its tokens and why" text={json} />
      </div>
      <p>
        task <a href={href("episodes", { task: episode.task_id })}>{episode.task_id}</a> · group{" "}
        <a href={href("episodes", { group: episode.group_id })}>{episode.group_id}</a> · model {episode.model} · opened at version{" "}
        {episode.version}
        {episode.agent && ` · agent ${episode.agent}`} · {moment(episode.created_at)} · {seconds(Math.max(ended - episode.created_at, 0))} ·{" "}
        {count(episode.calls.length, "call")}, {refused > 0 && `${count(refused, "refused call")}, `}
        {count(sampled, "token")} sampled
        {components(episode)}
      </p>
      {why && (
        <p class="verdict">
          <Words text={why.verdict} /> · <a href={href("episodes", id, { view: "why" })}>why</a>
        </p>
      )}
      {lastError(episode) && (
        <p class="error mono" title="The last line of the agent's or grader's output">
          {visible(lastError(episode))}
        </p>
      )}
      {record.running.length > 0 && (
        <p class="speaking" role="status">
          {count(record.running.length, "call")} running: {count(speaking, "token")} so far
        </p>
      )}
    </div>
  );
}

/** What went wrong last: the end of the agent's output, or the last call that was refused. */
function lastError(episode: EpisodeResponse): string {
  const refused = episode.refused_calls?.at(-1);
  return lastLine(episode.error) || (refused && !sampledOf(episode) ? `${refused.status} ${refused.code}: ${refused.message}` : "");
}

function components(episode: EpisodeResponse): string {
  const parts = Object.entries(episode.components ?? {});
  return parts.length ? ` · ${parts.map(([name, value]) => `${name} ${number(value)}`).join(", ")}` : "";
}

interface TokensProps {
  record: EpisodeRecord;
  episode: EpisodeResponse;
  table: TokenTable;
  view: View;
  mode: Mode;
}

/** The views of tokens: what colors them, the panel of figures, and one of conversation, tree and group. */
function Tokens({ record, episode, table, view, mode }: TokensProps) {
  const pointed = useSignal<{ table: TokenTable | null; token: number; aloud: boolean }>({ table: null, token: -1, aloud: false });
  const target = useSignal<{ token: number } | null>(null);
  const advantage = advantageOf(episode, groupRewardsOf(record.group.value.value ?? []));
  const coloring = useMemo(() => coloringOf(table, mode, advantage), [table, mode, advantage]);
  const stories = useMemo(() => storiesOf(table), [table]);
  const path = Number(route.value.query.get("path") ?? NaN);
  const story = stories.find((each) => each.at(-1) === path) ?? longestStory(table, stories);
  const leaf = story.at(-1) ?? -1;
  const models = [...new Set(episode.calls.filter((call) => call.node >= 0).map((call) => call.model))];
  const wanted = route.value.query.get("token");
  useEffect(() => {
    if (wanted === null) return;
    pointed.value = { table: null, token: Number(wanted), aloud: false };
    target.value = { token: Number(wanted) };
  }, [wanted]);
  const point = (token: number, by: "pointer" | "keyboard", of: TokenTable | null = null) => {
    const now = pointed.peek();
    if (now.token !== token || now.table !== of || by === "keyboard") pointed.value = { table: of, token, aloud: by === "keyboard" };
  };
  const { token, aloud } = pointed.value;
  const shown = { table, coloring, current: pointed.value.table ? -1 : token, point, target: target.value };
  const messages = view === "conversation" && route.value.query.get("text") !== "template" && wanted === null;
  return (
    <>
      <div class="toolbar">
        {view === "conversation" && (
          <button type="button" aria-pressed={!messages} onClick={() => setQuery({ text: messages ? "template" : null, token: null })}>
            Tokens in the template's text
          </button>
        )}
        {!messages && <ColorBar coloring={coloring} choose={(name) => setQuery({ color: name })} />}
        {view === "conversation" && stories.length > 1 && (
          <label>
            Conversation
            <select value={leaf} onChange={(event) => setQuery({ path: event.currentTarget.value })}>
              {stories.map((each, i) => (
                <option key={each.at(-1)} value={each.at(-1)}>
                  {i + 1} of {stories.length}: to node {each.at(-1)}
                </option>
              ))}
            </select>
          </label>
        )}
        {models.length > 1 && (
          <label>
            Model
            <select value={table.model} onChange={(event) => setQuery({ model: event.currentTarget.value, token: null, path: null })}>
              {models.map((model) => (
                <option key={model} value={model}>
                  {model}
                </option>
              ))}
            </select>
          </label>
        )}
      </div>
      {messages ? (
        <MessageView table={table} story={story} episode={episode} />
      ) : !table.nodes.length && view !== "group" ? (
        <Empty>{episode.state === "closed" ? "Nothing was sampled in this episode." : "Nothing was sampled in this episode yet."}</Empty>
      ) : (
        <div class="tokens">
          <div class="tokens-main">
            {view === "conversation" && <Conversation {...shown} leaf={leaf} />}
            {view === "tokens" && <TokenTree {...shown} jump={(at) => (point(at, "keyboard"), (target.value = { token: at }))} />}
            {view === "group" && <GroupView episode={episode} table={table} group={record.group} mode={mode} changes={record.changes.value} point={(at, of, by) => point(at, by, of)} />}
          </div>
          <TokenPanel table={pointed.value.table ?? table} calls={pointed.value.table ? [] : episode.calls} token={token} aloud={aloud} />
        </div>
      )}
    </>
  );
}
