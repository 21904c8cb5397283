// Engines and nodes: who does what, since when, with which version; and the few things that people do to them.
import { useSignal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import { get, post, remove, session } from "../api";
import { confirmDrain, confirmMove, confirmPause, confirmResume } from "../engines/actions";
import { beginOf, endOf, updatesOf, type Call, type Engine, type Node, type Timeline, type Update, type VersionRow } from "../engines/types";
import { clock, duration, plural, share, short } from "../format";
import { Gantt } from "../gantt/gantt";
import { rowsOf } from "../gantt/rows";
import { is, useEvents } from "../live";
import { useLoaded } from "../load";
import { Badge, type Tone } from "../parts/badge";
import { Chart } from "../parts/chart";
import { Empty, Failure, Loading } from "../parts/notice";
import { Table } from "../parts/table";
import { href, route, setQuery } from "../router";
import { model, recorded, shell } from "../shell";

interface Fleet {
  engines: Engine[];
  nodes: Node[];
  calls: Call[];
}

async function loadFleet(signal: AbortSignal): Promise<Fleet> {
  const own = shell.value?.project; // nodes are the root key's alone
  const [engines, calls, nodes] = await Promise.all([
    get<{ engines: Engine[] }>("/admin/v1/engines", {}, signal),
    get<{ calls: Call[] }>("/admin/v1/calls", {}, signal),
    own ? { nodes: [] } : get<{ nodes: Node[] }>("/admin/v1/nodes", {}, signal),
  ]);
  return { engines: engines.engines, calls: calls.calls, nodes: nodes.nodes };
}

export function EnginesView() {
  const fleet = useLoaded(loadFleet, [session.value], recorded.value ? 0 : 2_000);
  useEvents((events) => events.some((event) => is(event, "engine", "node", "version", "gap")) && fleet.again());
  const known = fleet.value.value;
  const done = () => fleet.again();
  return (
    <>
      <h1>Engines and nodes</h1>
      <TimelinePart />
      <Failure text={fleet.error.value} />
      {!known && !fleet.error.value && <Loading />}
      {known && !recorded.value && (
        <>
          <h2>Engines</h2>
          <Engines fleet={known} done={done} />
          <h2>Calls</h2>
          <Calls fleet={known} done={done} />
        </>
      )}
      {known && known.nodes.length > 0 && (
        <>
          <h2>Nodes</h2>
          <Nodes nodes={known.nodes} />
        </>
      )}
      <Updates />
    </>
  );
}

const WINDOWS: [string, string][] = [
  ["600", "10 minutes"],
  ["3600", "1 hour"],
  ["21600", "6 hours"],
  ["86400", "1 day"],
  ["", "all that is kept"],
];

function TimelinePart() {
  const seconds = route.value.query.get("window") ?? (recorded.value ? "" : "3600");
  const ask = (signal: AbortSignal) => {
    const since = seconds ? Date.now() / 1000 - Number(seconds) : undefined;
    return get<Timeline>("/admin/v1/timeline", { model: model.value, since }, signal);
  };
  const { value, error, again } = useLoaded(ask, [model.value, seconds, recorded.value, session.value], recorded.value ? 0 : 5_000);
  useEvents((events) => events.some((event) => is(event, "engine", "node", "version")) && again(), [seconds]);
  const timeline = value.value;
  const rows = useMemo(() => (timeline ? rowsOf(timeline) : []), [timeline]);
  const versions = (timeline?.versions ?? []).flatMap(({ version, live_at }) => (live_at === null ? [] : [{ version, at: live_at }]));
  return (
    <section class="panel" aria-labelledby="timeline">
      <div class="panel-head">
        <h2 id="timeline">Timeline</h2>
        <label class="quiet">
          Last{" "}
          <select value={seconds} onChange={(event) => setQuery({ window: event.currentTarget.value })}>
            {WINDOWS.map(([each, text]) => (
              <option key={each} value={each}>
                {text}
              </option>
            ))}
          </select>
        </label>
      </div>
      <Failure text={error.value} />
      {timeline && rows.length > 0 && <Gantt rows={rows} from={beginOf(timeline)} to={endOf(timeline)} versions={versions} />}
      {timeline && !rows.length && <Empty>Nothing is recorded in this time.</Empty>}
    </section>
  );
}

const TONES: Record<string, Tone> = { open: "good", held: "warn", starting: "info", draining: "warn", asleep: "plain", quarantined: "bad", dead: "bad" };

function Engines({ fleet, done }: { fleet: Fleet; done: () => void }) {
  const most = Math.max(1, ...fleet.engines.map((engine) => engine.streams));
  const others = (engine: Engine) => fleet.engines.filter((one) => one.model === engine.model && one !== engine && one.state === "open").length;
  const path = (engine: Engine) => `/admin/v1/engines/${encodeURIComponent(engine.name)}`;
  const act = (ask: () => Promise<unknown>) => () => ask().finally(done);
  return (
    <Table
      caption="Engines"
      rows={fleet.engines}
      id={(engine) => engine.name}
      empty="No engine: add one, or look at [engine] in the gateway's file."
      columns={[
        { head: "Engine", cell: (engine) => <strong>{engine.name}</strong> },
        { head: "Model", cell: (engine) => engine.model },
        { head: "Node", cell: (engine) => engine.node ?? "–" },
        { head: "State", cell: (engine) => <Badge tone={TONES[engine.state] ?? "plain"}>{engine.state}</Badge> },
        { head: "Why", cell: (engine) => engine.reason || "–" },
        { head: "Version", cell: (engine) => (engine.version < 0 ? "–" : engine.version), number: true },
        {
          head: "Load",
          cell: (engine) => (
            <span class="together">
              <span class="load" style={{ width: `${(4 * engine.streams) / most}rem` }} />
              {plural(engine.streams, "call")}
              {engine.pinned ? `, ${engine.pinned} pinned` : ""}
            </span>
          ),
        },
        { head: "Step, alone", cell: (engine) => (engine.speed ? duration(engine.speed.k4 + engine.speed.k3) : "–"), number: true },
        { head: "Restarts", cell: (engine) => engine.restarts, number: true },
        {
          head: "Actions",
          cell: (engine) => (
            <span class="buttons">
              {engine.paused ? (
                <button type="button" aria-label={`Resume ${engine.name}`} onClick={() => confirmResume(engine, act(() => post(`${path(engine)}/resume`)))}>
                  Resume
                </button>
              ) : (
                <button type="button" aria-label={`Pause ${engine.name}`} onClick={() => confirmPause(engine, others(engine), act(() => post(`${path(engine)}/pause`)))}>
                  Pause
                </button>
              )}
              <button type="button" aria-label={`Drain ${engine.name}`} onClick={() => confirmDrain(engine, others(engine), act(() => remove(path(engine))))}>
                Drain
              </button>
            </span>
          ),
        },
      ]}
    />
  );
}

const SHOWN = 50;

function Calls({ fleet, done }: { fleet: Fleet; done: () => void }) {
  const waiting = fleet.calls.filter((call) => call.engine === null).length;
  const move = (call: Call) => {
    const places = fleet.engines.filter((one) => one.model === call.model && one.name !== call.engine && one.state === "open").map((one) => one.name);
    confirmMove(call, places, (engine) => post(`/admin/v1/calls/${encodeURIComponent(call.call_id)}/move`, { engine }).finally(done));
  };
  return (
    <details>
      <summary>
        {plural(fleet.calls.length, "call")} in the gateway, {waiting} waiting for an engine
      </summary>
      <Table
        caption="Calls that run or wait"
        rows={fleet.calls.slice(0, SHOWN)}
        id={(call) => call.call_id}
        empty="No call runs."
        columns={[
          { head: "Call", cell: (call) => <span class="mono">{call.call_id}</span> },
          { head: "Episode", cell: (call) => (call.episode_id ? <a href={href("episodes", call.episode_id)}>{call.episode_id}</a> : "–") },
          { head: "Engine", cell: (call) => call.engine ?? <Badge tone="warn">waits</Badge> },
          { head: "Tokens", cell: (call) => call.tokens, number: true },
          {
            head: "Actions",
            cell: (call) =>
              call.pinned ? (
                <span class="quiet">pinned: it must stay</span>
              ) : (
                <span class="buttons">
                  <button type="button" aria-label={`Move ${call.call_id}`} disabled={call.engine === null} onClick={() => move(call)}>
                    Move
                  </button>
                </span>
              ),
          },
        ]}
      />
      {fleet.calls.length > SHOWN && <p class="hint">The first {SHOWN} are shown.</p>}
    </details>
  );
}

function Nodes({ nodes }: { nodes: Node[] }) {
  const whole = (node: Node) => Object.values(node.seconds).reduce((sum, seconds) => sum + seconds, 0);
  return (
    <Table
      caption="Nodes"
      rows={nodes}
      id={(node) => node.name}
      columns={[
        { head: "Node", cell: (node) => <strong>{node.name}</strong> },
        { head: "For", cell: (node) => node.tags.join(", ") },
        { head: "Role", cell: (node) => <Badge tone={node.role === "train" ? "info" : node.role === "rollout" ? "good" : "plain"}>{node.role}</Badge> },
        { head: "Why", cell: (node) => node.reason || "–" },
        { head: "Claimed by", cell: (node) => node.claimed_by ?? "–" },
        { head: "Engines", cell: (node) => node.engines.join(", ") || "–" },
        {
          head: "Time by role",
          cell: (node) => Object.entries(node.seconds).filter(([, seconds]) => seconds > 0).map(([role, seconds]) => `${role} ${share(seconds / whole(node))}`).join(", ") || "–",
        },
      ]}
    />
  );
}

const COLORS = 6;
const VERSION_TONES: Record<string, Tone> = { live: "good", failed: "bad", replaced: "plain" };

function Updates() {
  const all = useSignal(false);
  const ask = (signal: AbortSignal) => get<{ versions: VersionRow[] }>("/admin/v1/versions", { model: model.value }, signal);
  const { value, error, again } = useLoaded(ask, [model.value, session.value]);
  useEvents((events) => events.some((event) => is(event, "version", "gap")) && again());
  const updates = useMemo(() => updatesOf(value.value?.versions ?? []), [value.value]);
  const curves = useMemo(() => curvesOf(updates), [updates]);
  const newestFirst = [...updates].reverse();
  return (
    <>
      <h2>Weight updates</h2>
      <Failure text={error.value} />
      {curves.x.length > 1 && (
        <div class="charts">
          {curves.margins.some((line) => line.values.some((value) => value !== null)) && (
            <section class="panel" aria-labelledby="margins">
              <h3 id="margins">Margin of the probe by version</h3>
              <Chart label="Margin of the probe" x={curves.x} lines={curves.margins} band={[0.5, 1.5]} sync="versions" xLabel="version" />
              <p class="hint">1: the engine runs the new weights. -1: it still runs those before.</p>
            </section>
          )}
          <section class="panel" aria-labelledby="update-seconds">
            <h3 id="update-seconds">Seconds of an update by version</h3>
            <Chart label="Seconds of an update" x={curves.x} lines={curves.seconds} sync="versions" format={duration} xLabel="version" />
            <p class="hint">From the pause of an engine until it samples again.</p>
          </section>
        </div>
      )}
      <Table
        caption="Updates of engines to versions"
        rows={all.value ? newestFirst : newestFirst.slice(0, 12)}
        id={(one) => `${one.version} ${one.engine}`}
        empty="No version was published yet."
        columns={[
          { head: "Version", cell: (one) => one.version, number: true },
          { head: "State", cell: (one) => <Badge tone={VERSION_TONES[one.state] ?? "info"}>{one.state}</Badge> },
          { head: "Published", cell: (one) => <span class="together">{clock(one.created_at)}</span> },
          { head: "Live after", cell: (one) => (one.live_at ? duration(one.live_at - one.created_at) : "–"), number: true },
          { head: "Engine", cell: (one) => <span class="together">{one.engine || "–"}</span> },
          { head: "Proof", cell: (one) => verdict(one.proof, "proven") },
          { head: "Probe", cell: (one) => verdict(one.verdict, "passed") },
          { head: "Margin", cell: (one) => short(one.margin), number: true },
          { head: "Gap, nats", cell: (one) => short(one.gap), number: true },
          { head: "Calls carried", cell: (one) => one.streams ?? "–", number: true },
          { head: "Steps", cell: (one) => Object.entries(one.seconds).map(([name, seconds]) => `${name} ${duration(seconds)}`).join(", ") || "–" },
          { head: "What went wrong", cell: (one) => one.failure || one.bad || "–" },
        ]}
      />
      {updates.length > 12 && (
        <p>
          <button type="button" onClick={() => (all.value = !all.value)}>
            {all.value ? "Show the newest" : `Show all ${updates.length}`}
          </button>
        </p>
      )}
    </>
  );
}

function verdict(found: string, good: string) {
  return found ? <Badge tone={found === good ? "good" : found === "failed" ? "bad" : "warn"}>{found}</Badge> : "–";
}

function curvesOf(updates: Update[]) {
  const x = [...new Set(updates.map((one) => one.version))].sort((a, b) => a - b);
  const engines = [...new Set(updates.filter((one) => one.engine).map((one) => one.engine))].slice(0, COLORS);
  const lines = (of: (one: Update) => number | null) =>
    engines.map((engine, i) => {
      const mine = new Map(updates.filter((one) => one.engine === engine).map((one) => [one.version, of(one)]));
      return { label: engine, color: `--series-${i + 1}`, values: x.map((version) => mine.get(version) ?? null) };
    });
  const total = (one: Update) => Object.values(one.seconds).reduce((sum, seconds) => sum + seconds, 0);
  return { x, margins: lines((one) => one.margin), seconds: lines(total) };
}
