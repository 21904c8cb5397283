/** An episode's tokens as columns: what the admin API returns, as arrays that the views read by a token's number.
 *
 * Tokens are numbered through all nodes, in the order of the nodes. Prompt tokens have version -1 and log-probability NaN; a figure
 * of the trainer that was not computed is NaN.
 */

export interface TokenNode {
  index: number;
  /** The node that this one continues; -1: the root. */
  parent: number;
  /** The tokens of the parent that it continues. */
  at: number;
  sampled: boolean;
  /** The number of its first token. */
  start: number;
  tokens: number;
  call_id: string;
  /** The conversation of a sampled node. */
  lineage: number | null;
  temperature: number;
  mask_reason: string;
  finish_reason: string;
  reward: number | null;
}

type Column = (number | null)[];

/** `GET /admin/v1/episodes/{id}/tokens`. */
export interface TokensResponse {
  episode_id: string;
  model: string;
  state: string;
  reward: number | null;
  nodes: TokenNode[];
  text: string[];
  ids: number[];
  /** Places of control tokens, such as <|im_start|>. */
  control: number[];
  logprob: Column;
  version: number[];
  flags: number[];
  /** Indices into `mask_reasons`; 0: trained, or may be. */
  mask: number[];
  mask_reasons: string[];
  trained: TrainedResponse | null;
  untrained_why: string;
}

interface TrainedResponse {
  run: string;
  step: number;
  batch: number;
  version: number;
  logprob: Column;
  entropy: Column;
  advantage: Column;
  weight: Column;
  mismatch: Column;
  clipped: Column;
}

/** What the trainer's step computed of each token. */
export interface TrainedFigures {
  step: number;
  version: number;
  logprob: Float32Array;
  entropy: Float32Array;
  advantage: Float32Array;
  weight: Float32Array;
  mismatch: Float32Array;
  /** 1: outside of the trust region. */
  clipped: Uint8Array;
}

export interface TokenTable {
  episode_id: string;
  model: string;
  nodes: TokenNode[];
  ids: Int32Array;
  texts: string[];
  control: Set<number>;
  logprobs: Float32Array;
  versions: Int32Array;
  flags: Uint8Array;
  mask: Uint8Array;
  maskReasons: string[];
  /** Each token's node, by its place in `nodes`. */
  nodeOf: Int32Array;
  trained: TrainedFigures | null;
  untrainedWhy: string;
}

const floats = (column: Column): Float32Array => Float32Array.from(column, (value) => value ?? NaN);

export function tableOf(response: TokensResponse): TokenTable {
  const nodeOf = new Int32Array(response.ids.length);
  response.nodes.forEach((node, place) => nodeOf.fill(place, node.start, node.start + node.tokens));
  return {
    episode_id: response.episode_id,
    model: response.model,
    nodes: response.nodes,
    ids: Int32Array.from(response.ids),
    texts: response.text,
    control: new Set(response.control),
    logprobs: floats(response.logprob),
    versions: Int32Array.from(response.version),
    flags: Uint8Array.from(response.flags),
    mask: Uint8Array.from(response.mask),
    maskReasons: response.mask_reasons,
    nodeOf,
    trained: response.trained && trainedOf(response.trained),
    untrainedWhy: response.untrained_why,
  };
}

function trainedOf(response: TrainedResponse): TrainedFigures {
  return {
    step: response.step,
    version: response.version,
    logprob: floats(response.logprob),
    entropy: floats(response.entropy),
    advantage: floats(response.advantage),
    weight: floats(response.weight),
    mismatch: floats(response.mismatch),
    clipped: Uint8Array.from(response.clipped, (value) => value ?? 0),
  };
}

/** `TokenFlag` of the gateway, bit by bit. */
export const FLAGS: readonly (readonly [bit: number, name: string, words: string])[] = [
  [1, "constrained", "a grammar, a forced tool, a bias or a penalty shaped the choice"],
  [2, "truncated", "top-p, top-k or min-p cut the distribution"],
  [4, "greedy", "temperature 0: it was not drawn at all"],
  [8, "unrouted", "the experts behind its prediction were not recorded"],
  [16, "invalid_logprob", "the engine gave no usable log-probability"],
  [32, "unconfirmed", "two versions may have sampled it"],
  [64, "orphaned", "its version is not an ancestor of the newest"],
  [128, "late", "it is older than the bound allows in its batch"],
];

export function flagsOf(bits: number): string[] {
  return FLAGS.filter(([bit]) => bits & bit).map(([, name]) => name);
}

/** Why a token is not trained, as far as the record shows; empty: it is, or may be. */
export function maskOf(table: TokenTable, token: number): string {
  return table.maskReasons[table.mask[token]!] ?? "";
}

export function nodeAt(table: TokenTable, token: number): TokenNode {
  return table.nodes[table.nodeOf[token]!]!;
}
