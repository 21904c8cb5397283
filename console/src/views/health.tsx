// Health: is something wrong? A checklist of signals with their healthy ranges, what they say now, and what to do.
import { get, session } from "../api";
import { clock, duration, plural, share, short } from "../format";
import { useEvents } from "../live";
import { useLoaded } from "../load";
import { Badge, type Tone } from "../parts/badge";
import { Failure, Loading } from "../parts/notice";
import { Table } from "../parts/table";
import { href } from "../router";
import { model } from "../shell";

type State = "ok" | "warn" | "bad" | "unknown";

interface Signal {
  name: string;
  label: string;
  value: number | null;
  unit: string;
  state: State;
  healthy: string;
  /** What it says now; why it is not known. */
  words: string;
  do: string;
  link: { view: string; query: Record<string, string> } | null;
}

interface Health {
  at: number;
  signals: Signal[];
}

const STATES: Record<State, { tone: Tone; word: string; order: number }> = {
  bad: { tone: "bad", word: "act", order: 0 },
  warn: { tone: "warn", word: "look", order: 1 },
  unknown: { tone: "plain", word: "not known", order: 2 },
  ok: { tone: "good", word: "well", order: 3 },
};

function shown({ value, unit }: Signal): string {
  if (unit === "share") return share(value);
  if (unit === "s" || unit === "seconds") return duration(value);
  return unit && unit !== "count" ? `${short(value)} ${unit}` : short(value);
}

export function HealthView() {
  const { value, error, again } = useLoaded((signal) => get<Health>("/admin/v1/health", { model: model.value }, signal), [model.value, session.value], 10_000);
  useEvents((events) => events.length && again());
  const health = value.value;
  return (
    <>
      <h1>Health</h1>
      <Failure text={error.value} />
      {!health && !error.value && <Loading />}
      {health && <Checklist health={health} />}
    </>
  );
}

function Checklist({ health }: { health: Health }) {
  const signals = [...health.signals].sort((a, b) => STATES[a.state].order - STATES[b.state].order);
  const wrong = signals.filter((one) => one.state === "bad" || one.state === "warn");
  return (
    <>
      <p role="status">
        {wrong.length ? `${plural(wrong.length, "signal")} of ${signals.length} out of the healthy range.` : `All ${signals.length} signals are in their healthy ranges, or not known yet.`}{" "}
        <span class="quiet">As of {clock(health.at)}.</span>
      </p>
      <Table
        caption="Signals of health"
        rows={signals}
        id={(one) => one.name}
        columns={[
          { head: "State", cell: (one) => <Badge tone={STATES[one.state].tone}>{STATES[one.state].word}</Badge> },
          { head: "Signal", cell: (one) => <strong>{one.label}</strong> },
          { head: "Now", cell: (one) => (one.value === null ? <span class="quiet">{one.words}</span> : <span class="together">{shown(one)}</span>) },
          { head: "Healthy", cell: (one) => <span class="together">{one.healthy}</span> },
            { head: "What to do", cell: (one) => (one.state === "bad" || one.state === "warn" ? one.do : <span class="quiet">{one.do}</span>) },
          { head: "See", cell: (one) => one.link && <a href={href(one.link.view, { model: model.value, ...one.link.query })} aria-label={`Show: ${one.label}`}>Show</a> },
        ]}
      />
      <p class="hint">The ranges are where to begin, not laws: look at the change from your own first steps. Curves of most signals are in Run.</p>
    </>
  );
}
