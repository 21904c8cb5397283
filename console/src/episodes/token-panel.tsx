/** The figures of the token that is pointed at, and of the call that sampled it. */

import { address } from "../api";
import { askAgain } from "./curl";
import { CopyButton } from "./copy";
import { figuresOf, spoken } from "./figures";
import { nodeAt, type TokenTable } from "./table";
import type { Call } from "./types";
import { number, seconds } from "./words";

interface Props {
  table: TokenTable;
  calls: readonly Call[];
  token: number;
  /** True if it was reached by keys: then it is read out. */
  aloud: boolean;
}

export function TokenPanel({ table, calls, token, aloud }: Props) {
  const known = token >= 0 && token < table.ids.length;
  const node = known ? nodeAt(table, token) : null;
  const call = node && calls.find((one) => one.call_id === node.call_id);
  return (
    <aside class="token-panel panel" aria-label="Figures of the token">
      <p class="unseen" role="status">
        {known && aloud ? spoken(table, token) : ""}
      </p>
      {known ? <Figures table={table} token={token} /> : <Keys />}
      {call && node && (
        <>
          <h3>Its call</h3>
          <dl class="figures">
            <Line name="call" value={call.call_id} />
            <Line name="engine" value={call.engine || "–"} />
            <Line name="tokens" value={`${call.prompt_tokens.toLocaleString("en-US")} in, ${call.completion_tokens.toLocaleString("en-US")} out`} />
            <Line name="took" value={seconds(call.seconds)} />
            <Line name="ended" value={call.finish_reason || "–"} />
            <Line name="temperature" value={number(node.temperature)} />
            {call.pauses > 0 && <Line name="pauses" value={String(call.pauses)} />}
            {call.reward !== null && <Line name="reward" value={number(call.reward)} />}
            {call.tool_faults && <Line name="tool calls" value={call.tool_faults.replaceAll(",", ", ").replaceAll("_", " ")} />}
          </dl>
          {call.node >= 0 && (
            <CopyButton
              label="Copy call as curl"
              title="A request to /v1/completions with the same token ids and sampling parameters"
              text={() => askAgain(address("").replace(/\/$/, ""), table, call)}
            />
          )}
        </>
      )}
    </aside>
  );
}

function Figures({ table, token }: { table: TokenTable; token: number }) {
  return (
    <dl class="figures">
      {figuresOf(table, token).map((figure) => (
        <Line key={figure.name + figure.value} name={figure.name} value={figure.value} words={figure.words} />
      ))}
    </dl>
  );
}

function Line({ name, value, words }: { name: string; value: string; words?: string | undefined }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>
        <code>{value}</code>
        {words && <span class="quiet"> {words}</span>}
      </dd>
    </div>
  );
}

function Keys() {
  return (
    <>
      <p class="quiet">Point at a token, or walk with the keys, to see its figures.</p>
      <dl class="keys">
        {KEYS.map(([keys, words]) => (
          <div key={keys}>
            <dt>
              {keys.split(" ").map((key) => (
                <kbd key={key}>{key}</kbd>
              ))}
            </dt>
            <dd>{words}</dd>
          </div>
        ))}
      </dl>
    </>
  );
}

const KEYS = [
  ["← →", "token by token"],
  ["↑ ↓", "line by line"],
  ["[ ]", "the turn before, the next one"],
  ["p n", "where the color changes"],
  ["Home End", "the first, the last token"],
] as const;
