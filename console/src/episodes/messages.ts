/** A path of tokens as messages: who speaks where, read from the marks of the template. Pure.
 *
 * Marks count only where they are control tokens, so text that looks like one changes nothing. Every sampled token is shown, marks
 * too, because they are trained; of a prompt the marks are left out where the heading repeats them. A template of no known marks
 * gives a message for each piece of prompt and each turn.
 */

import { nodeAt, type TokenTable } from "./table";
import type { Section } from "./lines";
import type { Segment } from "./tree";
import type { RefusedCall } from "./types";

export interface Message extends Section {
  role: string;
  /** Tokens, and how many of them were sampled. */
  tokens: number;
  sampled: number;
  /** The node of its sampled tokens; -1: none were. */
  turn: number;
  /** True if the template has a mark at its beginning. */
  marked: boolean;
}

const HEADERS: Record<string, { until: string }> = {
  "<|im_start|>": { until: "\n" },
  "<|start_header_id|>": { until: "<|end_header_id|>" },
  "<start_of_turn>": { until: "\n" },
  "<|start|>": { until: "<|message|>" },
};
const SPEAKERS: Record<string, string> = {
  "<｜User｜>": "user",
  "<｜Assistant｜>": "assistant",
  "<|user|>": "user",
  "<|assistant|>": "assistant",
  "<|system|>": "system",
  "<|observation|>": "tool",
  "[INST]": "user",
  "[/INST]": "assistant",
};
const ENDS = new Set(["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eom_id|>", "<|endoftext|>", "<eos>", "</s>", "<｜end▁of▁sentence｜>"]);
/** A role's name takes at most this many tokens. */
const NAME = 24;

export function messagesOf(table: TokenTable, path: readonly Segment[]): Message[] {
  const tokens = path.flatMap(({ from, to }) => Array.from({ length: to - from }, (_, i) => from + i));
  const hidden = new Set<number>();
  const messages: Message[] = [];
  let sampling = false;
  for (let i = 0; i < tokens.length; i++) {
    const token = tokens[i]!;
    const sampled = nodeAt(table, token).sampled;
    const header = !sampled && table.control.has(token) ? headerAt(table, tokens, i) : null;
    // Between a turn and the next message there may be prompt tokens: the template's own end of the turn.
    if (header) {
      messages.push(begun(header.role, true));
      for (let k = i; k < header.to; k++) hidden.add(tokens[k]!);
      for (let k = i; k < header.to; k++) put(messages, table, tokens[k]!);
      i = header.to - 1;
      sampling = false;
      continue;
    }
    if (!messages.length || (sampled !== sampling && !belongs(messages[messages.length - 1]!, sampled)))
      messages.push(begun(sampled ? "assistant" : "prompt", false));
    if (!sampled && (ENDS.has(table.texts[token]!) || isGap(table, tokens, i, hidden))) hidden.add(token);
    put(messages, table, token);
    sampling = sampled;
  }
  for (const message of messages) {
    message.hidden = (token) => hidden.has(token);
    if (message.role === "user" && isToolResult(table, message)) message.role = "tool";
  }
  return messages.filter((message) => message.tokens > 0);
}

/** The text of a message, without the template's marks. */
export function textOf(table: TokenTable, message: Message): string {
  let text = "";
  for (const { from, to } of message.segments)
    for (let token = from; token < to; token++) if (!message.hidden?.(token) && !ENDS.has(table.texts[token]!)) text += table.texts[token]!;
  return text;
}

/** The messages with the refused calls between them, by time: a message has the time of the call that it went into. */
export function withRefusals(
  messages: readonly Message[],
  refused: readonly RefusedCall[],
  timeOf: (turn: number) => number | null,
): ({ message: Message } | { refused: RefusedCall })[] {
  const times: (number | null)[] = messages.map((message) => (message.turn < 0 ? null : timeOf(message.turn)));
  for (let i = times.length - 2; i >= 0; i--) times[i] ??= times[i + 1]!;
  const rows: ({ message: Message } | { refused: RefusedCall })[] = [];
  const waiting = [...refused].sort((a, b) => a.at - b.at);
  messages.forEach((message, i) => {
    while (waiting.length && times[i] != null && waiting[0]!.at < times[i]!) rows.push({ refused: waiting.shift()! });
    rows.push({ message });
  });
  return [...rows, ...waiting.map((one) => ({ refused: one }))];
}

const begun = (role: string, marked: boolean): Message => ({ role, marked, segments: [], indent: 0, tokens: 0, sampled: 0, turn: -1 });

function put(messages: Message[], table: TokenTable, token: number): void {
  const message = messages[messages.length - 1]!;
  const segment = message.segments[message.segments.length - 1];
  const place = table.nodeOf[token]!;
  if (segment && segment.node === place && segment.to === token) segment.to++;
  else message.segments.push({ node: place, from: token, to: token + 1 });
  message.tokens++;
  if (table.nodes[place]!.sampled) {
    message.sampled++;
    message.turn = place;
  }
}

/** True if the tokens that begin here are still the message's: the reply under its mark, and the template's end of the reply. */
function belongs(message: Message, sampled: boolean): boolean {
  return message.marked && (sampled ? message.sampled === 0 : true);
}

function headerAt(table: TokenTable, tokens: readonly number[], at: number): { role: string; to: number } | null {
  const mark = table.texts[tokens[at]!]!;
  const speaker = SPEAKERS[mark];
  if (speaker) return { role: speaker, to: at + 1 };
  const header = HEADERS[mark];
  if (!header) return null;
  let name = "";
  for (let i = at + 1; i < tokens.length && i <= at + NAME; i++) {
    name += table.texts[tokens[i]!]!;
    const end = name.indexOf(header.until);
    if (end < 0) continue;
    const rest = name.slice(end + header.until.length);
    let to = rest.trim() === "" ? i + 1 : i;
    // Llama's header is followed by an empty line.
    if (header.until !== "\n" && to < tokens.length && /^\n+$/.test(table.texts[tokens[to]!]!)) to++;
    return { role: name.slice(0, end).trim() || "message", to };
  }
  return null;
}

/** White space of the prompt between the end of a message and the next one. */
function isGap(table: TokenTable, tokens: readonly number[], at: number, hidden: ReadonlySet<number>): boolean {
  if (!/^\s+$/.test(table.texts[tokens[at]!]!)) return false;
  const before = tokens[at - 1];
  return before !== undefined && (hidden.has(before) || ENDS.has(table.texts[before]!));
}

function isToolResult(table: TokenTable, message: Message): boolean {
  let text = "";
  for (const { from, to } of message.segments) {
    for (let token = from; token < to && text.length < 64; token++) if (!message.hidden?.(token)) text += table.texts[token]!;
  }
  return text.trimStart().startsWith("<tool_response>");
}
