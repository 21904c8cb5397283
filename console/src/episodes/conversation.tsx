/** One path of the token tree as a conversation. */

import { useMemo } from "preact/hooks";
import { Badge } from "../parts/badge";
import { messagesOf, type Message } from "./messages";
import type { Coloring } from "./scale";
import type { TokenNode, TokenTable } from "./table";
import { TokenView } from "./token-view";
import { pathTo } from "./tree";
import { count, number } from "./words";

interface Props {
  table: TokenTable;
  /** The node at which the conversation ends. */
  leaf: number;
  coloring: Coloring;
  current: number;
  point: (token: number, by: "pointer" | "keyboard") => void;
  target: { token: number } | null;
  /** Leaves out what comes before the first reply: members of a group have it in common. */
  replies?: boolean;
  label?: string;
}

export function Conversation({ table, leaf, coloring, current, point, target, replies = false, label = "Conversation" }: Props) {
  const messages = useMemo(() => {
    const all = messagesOf(table, pathTo(table.nodes, leaf));
    const first = all.findIndex((message) => message.sampled > 0);
    return replies && first > 0 ? all.slice(first) : all;
  }, [table, leaf, replies]);
  return (
    <TokenView
      label={label}
      table={table}
      sections={messages}
      coloring={coloring}
      head={(section) => <MessageHead table={table} message={messages[section]!} />}
      current={current}
      point={point}
      target={target}
    />
  );
}

export function MessageHead({ table, message }: { table: TokenTable; message: Message }) {
  const turn = message.turn < 0 ? null : table.nodes[message.turn]!;
  return (
    <>
      <span class={`role r-${message.role}`}>{message.role}</span>
      {turn ? <TurnWords table={table} node={turn} /> : <span class="quiet">{count(message.tokens, "token")}</span>}
    </>
  );
}

/** A sampled node in a line: its tokens, who sampled them, how it ended. */
export function TurnWords({ table, node }: { table: TokenTable; node: TokenNode }) {
  const last = node.start + node.tokens - 1;
  const versions = node.tokens ? [table.versions[node.start]!, table.versions[last]!] : [];
  const sampledBy = versions[0] === versions[1] ? `version ${versions[0]}` : `versions ${versions[0]} to ${versions[1]}`;
  const finish = node.finish_reason && `, ${node.finish_reason.replaceAll("_", " ")}`;
  const words = `${count(node.tokens, "token")} of ${sampledBy}${finish}`;
  return (
    <>
      <span class="quiet" title={words}>
        {words}
      </span>
      {node.finish_reason === "length" && <Badge tone="warn">cut at its limit</Badge>}
      {node.mask_reason && <Badge tone="warn">not trained: {node.mask_reason.replaceAll("_", " ")}</Badge>}
      {node.reward !== null && <Badge tone="info">reward {number(node.reward)}</Badge>}
    </>
  );
}
