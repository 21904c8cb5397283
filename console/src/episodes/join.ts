/** Tokens that came later, put behind those that are here. Pure. */

import type { TokensResponse } from "./table";

/** `more` has the nodes from `from` on: the new nodes of a live episode. Numbers in it count from its own beginning. */
export function joined(old: TokensResponse, more: TokensResponse, from: number): TokensResponse {
  const kept = old.nodes.slice(0, from);
  const last = kept[kept.length - 1];
  const start = last ? last.start + last.tokens : 0;
  const reasons = [...old.mask_reasons];
  const codes = more.mask_reasons.map((reason) => {
    if (!reasons.includes(reason)) reasons.push(reason);
    return reasons.indexOf(reason);
  });
  const column = <T>(name: "text" | "ids" | "logprob" | "version" | "flags"): T[] =>
    [...old[name].slice(0, start), ...more[name]] as T[];
  return {
    ...more,
    nodes: [...kept, ...more.nodes.map((node) => ({ ...node, start: node.start + start }))],
    text: column("text"),
    ids: column("ids"),
    logprob: column("logprob"),
    version: column("version"),
    flags: column("flags"),
    control: [...old.control.filter((place) => place < start), ...more.control.map((place) => place + start)],
    mask: [...old.mask.slice(0, start), ...more.mask.map((code) => codes[code]!)],
    mask_reasons: reasons,
  };
}
