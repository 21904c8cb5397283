/** The episodes of a group side by side, the best first, under the prompt that they share. */

import { useSignal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import { get } from "../api";
import { useLoaded, type Loaded } from "../load";
import { Badge } from "../parts/badge";
import { Empty, Failure, Loading } from "../parts/notice";
import { href } from "../router";
import { advantageOf, advantageWords, groupRewardsOf } from "./advantage";
import { Conversation } from "./conversation";
import { MessageView } from "./message-view";
import { stateTone, stateWords } from "./row";
import { coloringOf, type Mode } from "./scale";
import { tableOf, type TokensResponse, type TokenTable } from "./table";
import type { EpisodeResponse, EpisodeRow } from "./types";
import { longestOf } from "./tree";
import { count, number } from "./words";

/** Members whose tokens are fetched together; more on demand. */
const FIRST = 8;

interface Props {
  episode: EpisodeResponse;
  /** The tokens of this episode, whose prompt the others share. */
  table: TokenTable;
  group: Loaded<EpisodeRow[]>;
  mode: Mode;
  /** Changes with every event of the group. */
  changes: number;
  point: (token: number, of: TokenTable, by: "pointer" | "keyboard") => void;
}

export function GroupView({ episode, table, group, mode, changes, point }: Props) {
  const shown = useSignal(FIRST);
  const members = useMemo(() => sorted(group.value.value ?? []), [group.value.value]);
  if (!members.length) return group.error.value ? <Failure text={group.error.value} /> : <Loading />;
  const rewards = groupRewardsOf(members);
  return (
    <>
      <p>
        {count(members.length, "episode")} of the group{" "}
        <a href={href("episodes", { group: episode.group_id })}>{episode.group_id}</a>
        {rewards && `: mean reward ${number(rewards.mean, 3)}, standard deviation ${number(rewards.std, 3)}`}.
      </p>
      {table.nodes.length > 0 && <MessageView table={table} story={[longestOf(table.nodes)]} episode={episode} prompt />}
      <div class="members" role="region" aria-label="Members of the group">
        {members.slice(0, shown.value).map((member) => (
          <Member
            key={member.episode_id}
            member={member}
            advantage={advantageOf(member, rewards)}
            own={member.episode_id === episode.episode_id}
            mode={mode}
            changes={changes}
            point={point}
          />
        ))}
      </div>
      {members.length > shown.value && (
        <button type="button" onClick={() => (shown.value += FIRST)}>
          {count(members.length - shown.value, "more episode")}
        </button>
      )}
    </>
  );
}

function sorted(episodes: readonly EpisodeRow[]): EpisodeRow[] {
  const worth = (row: EpisodeRow) => row.reward ?? -Infinity;
  return [...episodes].sort((a, b) => worth(b) - worth(a) || a.created_at - b.created_at);
}

interface MemberProps {
  member: EpisodeRow;
  advantage: number | null;
  own: boolean;
  mode: Mode;
  changes: number;
  point: (token: number, of: TokenTable, by: "pointer" | "keyboard") => void;
}

function Member({ member, advantage, own, mode, changes, point }: MemberProps) {
  const current = useSignal(-1);
  const path = `/admin/v1/episodes/${encodeURIComponent(member.episode_id)}/tokens`;
  const response = useLoaded((signal) => get<TokensResponse>(path, { model: member.model }, signal), [path, member.state, changes]);
  const table = useMemo(() => response.value.value && tableOf(response.value.value), [response.value.value]);
  const coloring = useMemo(() => table && coloringOf(table, mode, advantage), [table, mode, advantage]);
  return (
    <section class={own ? "member panel own" : "member panel"} aria-label={`Episode ${member.episode_id}`}>
      <h2>
        <a href={href("episodes", member.episode_id)}>{member.episode_id}</a>
        {own && <Badge tone="info">this one</Badge>}
      </h2>
      <p>
        <b>reward {number(member.reward)}</b>, advantage {advantageWords(advantage)} <Badge tone={stateTone(member)}>{stateWords(member)}</Badge>{" "}
        <span class="quiet">
          {count(member.calls ?? 0, "call")}, {count(member.sampled_tokens ?? 0, "token")}
        </span>
      </p>
      <Failure text={response.error.value} />
      {table && coloring && (table.nodes.length ? (
        <Conversation
          table={table}
          leaf={longestOf(table.nodes)}
          coloring={coloring}
          current={current.value}
          point={(token, by) => {
            current.value = token;
            point(token, table, by);
          }}
          target={null}
          replies
          label={`Replies of ${member.episode_id}`}
        />
      ) : (
        <Empty>It sampled nothing.</Empty>
      ))}
    </section>
  );
}
