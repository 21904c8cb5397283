/** Commands and texts to copy. Pure. The key is never part of them: the shell reads it from its environment. */

import type { TokenTable } from "./table";
import { pathTo } from "./tree";

const KEY = '-H "Authorization: Bearer $HEADGATE_ADMIN_KEY"';
const AGENT_KEY = '-H "Authorization: Bearer $OPENAI_API_KEY"';

/** A word for a POSIX shell. */
export function quoted(word: string): string {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`;
}

/** The command that reads a path of the admin API. */
export function curlOf(url: string): string {
  return `curl -s ${KEY} ${quoted(url)}`;
}

export interface CallRecord {
  call_id: string;
  model: string;
  node: number;
  used: Record<string, unknown>;
}

/** The sampling parameters that /v1/completions takes. */
const TAKEN = ["temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"];

/** The command that asks for a call's reply again: of the same token ids, with the parameters that were used. */
export function askAgain(origin: string, table: TokenTable, call: CallRecord): string {
  const node = table.nodes[call.node]!;
  const path = node.parent < 0 ? [] : [...pathTo(table.nodes, node.parent)];
  const prompt: number[] = [];
  // A path ends with all of its last node; a call continues only the first `at` tokens of it.
  path.forEach(({ from, to }, i) => {
    const end = i === path.length - 1 ? from + node.at : to;
    for (let token = from; token < end; token++) prompt.push(table.ids[token]!);
  });
  const body: Record<string, unknown> = { model: call.model, prompt, max_tokens: node.tokens };
  for (const name of TAKEN) if (call.used[name] != null) body[name] = call.used[name];
  return [
    `curl -s ${AGENT_KEY} -H 'Content-Type: application/json' ${quoted(`${origin}/v1/completions`)} \\`,
    `  -d ${quoted(JSON.stringify(body))}`,
  ].join("\n");
}

/** An episode and its tokens as JSON, as the admin API gave them. */
export function jsonOf(...parts: object[]): string {
  return JSON.stringify(Object.assign({}, ...parts), null, 2);
}
