// A small token table, written out by hand. Nodes: [parent, at, sampled, texts]; every other figure follows from the token's number.
import { tableOf, type TokensResponse, type TokenTable } from "../../src/episodes/table";

type Drawn = [parent: number, at: number, sampled: boolean, texts: string[]];

export function responseOf(nodes: Drawn[], more: Partial<TokensResponse> = {}): TokensResponse {
  const text = nodes.flatMap((node) => node[3]);
  const sampled = nodes.flatMap((node) => node[3].map(() => node[2]));
  let start = 0;
  const described = nodes.map(([parent, at, isSampled, texts], index) => {
    const node = {
      ...{ index, parent, at, sampled: isSampled, start, tokens: texts.length, call_id: isSampled ? `call-${index}` : "" },
      ...{ lineage: isSampled ? 0 : null, temperature: 1, mask_reason: "", finish_reason: isSampled ? "stop" : "", reward: null },
    };
    start += texts.length;
    return node;
  });
  return {
    episode_id: "ep-1",
    model: "demo",
    state: "closed",
    reward: 1,
    nodes: described,
    text,
    ids: text.map((_, i) => 100 + i),
    control: text.flatMap((one, i) => (/^<\|.*\|>$/.test(one) ? [i] : [])),
    logprob: sampled.map((is, i) => (is ? -i / 10 : null)),
    version: sampled.map((is) => (is ? 3 : -1)),
    flags: sampled.map(() => 0),
    mask: sampled.map((is) => (is ? 0 : 1)),
    mask_reasons: ["", "prompt"],
    trained: null,
    untrained_why: "set [report] tokens_every",
    ...more,
  };
}

export function drawn(nodes: Drawn[], more: Partial<TokensResponse> = {}): TokenTable {
  return tableOf(responseOf(nodes, more));
}
