// Health: is something wrong? A checklist of signals with their healthy ranges, their present values, and what to do.
import { session } from "../api";
import { clock, plural } from "../format";
import { useEvents } from "../live";
import { useLoaded } from "../load";
import { Badge, type Tone } from "../parts/badge";
import { Failure, Loading } from "../parts/notice";
import { Table } from "../parts/table";
import { href } from "../router";
import { loadHealth, type Health, type State } from "../run/health";
import { model, recorded } from "../shell";

const STATES: Record<State, { tone: Tone; word: string; order: number }> = {
  bad: { tone: "bad", word: "critical", order: 0 },
  warn: { tone: "warn", word: "warning", order: 1 },
  unknown: { tone: "plain", word: "not known", order: 2 },
  ok: { tone: "good", word: "OK", order: 3 },
};

export function HealthView() {
  const { value, error, again } = useLoaded((signal) => loadHealth(model.value, undefined, signal), [model.value, session.value], recorded.value ? 0 : 10_000);
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

/** How many signals are out of range, and how many are not known: they are neither OK nor out of range. */
export function summary(signals: readonly { state: State }[]): string {
  const count = (...states: State[]) => signals.filter((one) => states.includes(one.state)).length;
  const wrong = count("warn", "bad");
  const unknown = count("unknown");
  const known = signals.length - unknown;
  const text = wrong ? `${plural(wrong, "signal")} of ${known} out of the healthy range.` : `All ${known} known signals are in their healthy ranges.`;
  return unknown ? `${text} ${plural(unknown, "signal")} not known.` : text;
}

function Checklist({ health }: { health: Health }) {
  const signals = [...health.signals].sort((a, b) => STATES[a.state].order - STATES[b.state].order);
  return (
    <>
      <p role="status">
        {summary(signals)} <span class="quiet">{recorded.value ? `A recorded run: its last event was at ${clock(health.at)}.` : `As of ${clock(health.at)}.`}</span>
      </p>
      <Table
        caption="Signals of health"
        stacked
        rows={signals}
        id={(one) => one.name}
        columns={[
          { head: "State", cell: (one) => <Badge tone={STATES[one.state].tone}>{STATES[one.state].word}</Badge> },
          { head: "Signal", cell: (one) => <strong>{one.label}</strong> },
          { head: "Now", cell: (one) => <span class={one.value === null ? "quiet" : ""}>{one.words}</span> },
          { head: "Healthy", cell: (one) => <span class="together">{one.healthy}</span> },
          { head: "What to do", cell: (one) => (one.state === "bad" || one.state === "warn" ? one.do : <span class="quiet">{one.do}</span>) },
          { head: "See", cell: (one) => one.link && <a href={href(one.link.view, { model: model.value, ...one.link.query })} aria-label={`Show: ${one.label}`}>Show</a> },
        ]}
      />
      <p>Speed: {health.limits.line}.</p>
      <p class="hint">Treat these ranges as starting points, not rules: compare with your own first steps. Run has the curves of most signals.</p>
    </>
  );
}
