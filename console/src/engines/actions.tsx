// The question before something is done to an engine or a call: what happens, to how many, and what comes after.
import { plural } from "../format";
import { confirm } from "../parts/confirm";
import type { Call, Engine } from "./types";

type Act = () => Promise<unknown>;

const place = (others: number) =>
  others ? `${plural(others, "other open engine")} of ${others === 1 ? "the" : "this"} model take${others === 1 ? "s" : ""} new calls.` : "No other engine of this model is open: new calls will wait.";

/** Where the running calls of an engine go that takes none any more. `pinned`: what those do that cannot move. */
export function leave(engine: Pick<Engine, "streams" | "pinned">, others: number, pinned: string): string {
  const { streams } = engine;
  if (!streams) return "No call runs in it.";
  const calls = `Its ${plural(streams, "running call")}`;
  const stay = engine.pinned ? `; ${engine.pinned} pinned to it ${pinned}` : "";
  if (!others) return `${calls} ${streams === 1 ? "waits" : "wait"} with what was sampled, until an engine is open${stay}.`;
  return `${calls} ${streams === 1 ? "goes on in another engine from its" : "go on in other engines from their"} last token${stay}.`;
}

export function confirmPause(engine: Engine, others: number, act: Act): void {
  confirm({
    title: `Pause ${engine.name}?`,
    body: (
      <>
        <p>
          {leave(engine, others, "may end there first, within some seconds")} {place(others)}
        </p>
        <p>Updates pass it by until it is resumed; then it loads the newest weights. A restart of the gateway ends the pause.</p>
      </>
    ),
    action: "Pause",
    act,
  });
}

export function confirmResume(engine: Engine, act: Act): void {
  confirm({
    title: `Resume ${engine.name}?`,
    body: <p>It wakes, or is started again, loads the newest weights and is probed. Then it takes calls.</p>,
    action: "Resume",
    act,
  });
}

export function confirmDrain(engine: Engine, others: number, act: Act): void {
  confirm({
    title: `Drain ${engine.name}?`,
    body: (
      <>
        <p>
          {leave(engine, others, "end there first")} Then the engine is removed from the gateway, and stopped if the gateway started it.
        </p>
        <p>{place(others)} A drained engine does not come back by itself.</p>
      </>
    ),
    action: "Drain",
    dangerous: true,
    act,
  });
}

export function confirmMove(call: Call, places: string[], act: (engine: string | null) => Promise<unknown>): void {
  let chosen: string | null = null;
  confirm({
    title: `Move call ${call.call_id}?`,
    body: (
      <>
        <p>
          It leaves {call.engine ?? "the queue"} and goes on elsewhere from its last token ({plural(call.tokens, "token")} so far). Its agent notices nothing but a pause.
        </p>
        <label>
          To{" "}
          <select onChange={(event) => (chosen = event.currentTarget.value || null)}>
            <option value="">any other engine</option>
            {places.map((name) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
      </>
    ),
    action: "Move",
    act: () => act(chosen),
  });
}
