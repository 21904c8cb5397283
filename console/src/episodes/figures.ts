/** Everything that is known of one token, in the order in which it is shown. Pure. */

import { flagWords } from "./scale";
import { flagsOf, maskOf, nodeAt, type TokenTable } from "./table";
import { depthsOf } from "./tree";
import { number } from "./words";

export interface Figure {
  name: string;
  value: string;
  /** More words, where the value alone is not clear. */
  words?: string;
}

export function figuresOf(table: TokenTable, token: number): Figure[] {
  const node = nodeAt(table, token);
  const position = depthsOf(table.nodes)[node.index]! + token - node.start;
  const found: Figure[] = [
    { name: "token", value: JSON.stringify(table.texts[token]!), words: `id ${table.ids[token]}` },
    { name: "position", value: position.toLocaleString("en-US"), words: `node ${node.index}, its token ${token - node.start + 1}` },
  ];
  if (!node.sampled) return [...found, { name: "version", value: "–", words: "a token of the prompt" }];
  const logprob = table.logprobs[token]!;
  found.push(
    { name: "version", value: String(table.versions[token]) },
    { name: "log-probability", value: number(logprob), words: `probability ${number(Math.exp(logprob), 3)}` },
  );
  const trained = table.trained;
  if (trained) {
    found.push(
      { name: "entropy", value: number(trained.entropy[token]) },
      { name: "advantage", value: number(trained.advantage[token]) },
      { name: "importance weight", value: number(trained.weight[token]), ...(trained.clipped[token] ? { words: "clipped: no gradient" } : {}) },
      { name: "trainer mismatch", value: number(trained.mismatch[token]), words: `trainer ${number(trained.logprob[token])}` },
    );
  }
  found.push({ name: "mask", value: maskWords(maskOf(table, token), trained !== null) });
  for (const flag of flagsOf(table.flags[token]!)) found.push({ name: "flag", value: flag, words: flagWords(flag) });
  return found;
}

function maskWords(reason: string, trained: boolean): string {
  return reason ? `not trained: ${reason.replaceAll("_", " ")}` : trained ? "trained" : "none";
}

/** One sentence, for screen readers. */
export function spoken(table: TokenTable, token: number): string {
  return figuresOf(table, token)
    .filter((figure) => figure.value !== "–" && figure.name !== "position")
    .map((figure) => `${figure.name} ${figure.value}`)
    .join(", ");
}
