/** All tokens of an episode: each node once, branches under what they left, and a drawing of the tree. */

import { useMemo } from "preact/hooks";
import type { Section } from "./lines";
import { TurnWords } from "./conversation";
import type { Coloring } from "./scale";
import type { TokenNode, TokenTable } from "./table";
import { TokenView } from "./token-view";
import { barsOf, branchesOf } from "./tree";
import { count } from "./words";

interface Props {
  table: TokenTable;
  coloring: Coloring;
  current: number;
  point: (token: number, by: "pointer" | "keyboard") => void;
  target: { token: number } | null;
  /** Brings a token into sight. */
  jump: (token: number) => void;
}

export function TokenTree({ table, coloring, current, point, target, jump }: Props) {
  const branches = useMemo(() => branchesOf(table.nodes), [table]);
  const sections = useMemo(
    () => branches.map(({ node, indent }): Section => ({ indent, segments: [segmentOf(table.nodes[node]!)] })),
    [table, branches],
  );
  return (
    <>
      <TreeDrawing table={table} current={current} jump={jump} />
      <TokenView
        label="Token tree"
        table={table}
        sections={sections}
        coloring={coloring}
        head={(section) => <NodeHead table={table} node={table.nodes[branches[section]!.node]!} />}
        current={current}
        point={point}
        target={target}
      />
    </>
  );
}

const segmentOf = (node: TokenNode) => ({ node: node.index, from: node.start, to: node.start + node.tokens });

function NodeHead({ table, node }: { table: TokenTable; node: TokenNode }) {
  const parent = node.parent < 0 ? null : table.nodes[node.parent]!;
  const left = parent && node.at < parent.tokens ? `leaves node ${parent.index} at its token ${node.at + 1}` : parent ? `after node ${parent.index}` : "";
  return (
    <>
      <span class={node.sampled ? "role r-assistant" : "role r-prompt"}>
        node {node.index} {node.sampled ? "sampled" : "prompt"}
      </span>
      {node.sampled ? <TurnWords table={table} node={node} /> : <span class="quiet">{count(node.tokens, "token")}</span>}
      <span class="quiet">{left}</span>
    </>
  );
}

const LANE = 14;
const WIDE = 1000;

/** Nodes as bars from left to right, a lane for each way. It is a picture for the eye: the tree below is what keys walk through. */
function TreeDrawing({ table, current, jump }: { table: TokenTable; current: number; jump: (token: number) => void }) {
  const bars = useMemo(() => barsOf(table.nodes), [table]);
  if (bars.length < 2) return null;
  const end = Math.max(1, ...bars.map((bar) => bar.to));
  const lanes = 1 + Math.max(...bars.map((bar) => bar.lane));
  const x = (tokens: number) => (tokens / end) * WIDE;
  const here = table.nodeOf[current] ?? -1;
  const words = `${count(table.nodes.length, "node")} in ${count(lanes, "lane")}, ${count(table.ids.length, "token")}`;
  return (
    <div class="tree-drawing panel">
      <svg viewBox={`0 0 ${WIDE} ${lanes * LANE}`} height={Math.min(lanes, 12) * LANE} preserveAspectRatio="none" role="img" aria-label={words}>
        {bars.map((bar) => {
          const node = table.nodes[bar.node]!;
          const y = bar.lane * LANE;
          const forked = bar.parentLane >= 0 && bar.parentLane !== bar.lane;
          return (
            <g key={bar.node} onClick={() => jump(node.start)}>
              {forked && <path class="fork" vector-effect="non-scaling-stroke" d={`M${x(bar.from)} ${bar.parentLane * LANE + LANE / 2} V${y + LANE / 2}`} />}
              <rect
                class={`${node.sampled ? "sampled" : "given"}${node.mask_reason ? " masked" : ""}${bar.node === here ? " here" : ""}`}
                x={x(bar.from)}
                y={y + 2}
                width={Math.max(x(bar.to) - x(bar.from), 2)}
                height={LANE - 4}
              >
                <title>{`node ${node.index}: ${node.sampled ? "sampled" : "prompt"}, ${count(node.tokens, "token")}${node.mask_reason ? `, not trained: ${node.mask_reason}` : ""}`}</title>
              </rect>
            </g>
          );
        })}
      </svg>
      <p class="quiet">
        <span class="key given">prompt</span> · <span class="key sampled">sampled</span> · <span class="key masked">sampled, not trained</span> · {words}
      </p>
    </div>
  );
}
