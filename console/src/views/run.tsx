// Run: does it learn? The trainer's figures as charts over steps or time, with those of another run, growing as steps arrive.
import { useSignal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import { session } from "../api";
import { clock, duration, plural, share, short } from "../format";
import { is, useEvents } from "../live";
import { useLoaded } from "../load";
import { Badge } from "../parts/badge";
import { Chart, type Line, type Mark } from "../parts/chart";
import { Empty, Failure, Loading } from "../parts/notice";
import { Table } from "../parts/table";
import { href, route, setQuery } from "../router";
import { loadHealth, type Signal } from "../run/health";
import { phases, PLOTS, type Curve, type Plot } from "../run/plots";
import { grown, joined, loadRuns, loadSteps, smoothed, type Run, type Steps } from "../run/steps";
import { model, recorded } from "../shell";

const SHOWN_IN_TABLE = ["reward_mean_all", "reward_mean", "eval/reward_mean", "excluded_share", "loss", "kl_recorded_k3", "entropy", "logprob_gap_mean", "staleness_mean", "seconds/total"];

export function RunView() {
  const runs = useLoaded((signal) => loadRuns(model.value, signal), [model.value, session.value]);
  useEvents((events) => events.some((event) => is(event, "trainer", "gap")) && runs.again());
  const list = runs.value.value;
  const query = route.value.query;
  const run = list?.find((one) => one.run === query.get("run")) ?? list?.[0];
  const other = list?.find((one) => one.run === query.get("with") && one !== run);
  return (
    <>
      <h1>Run</h1>
      <Failure text={runs.error.value} />
      {!list && !runs.error.value && <Loading />}
      {list && !run && (
        <Empty>
          This gateway has no steps yet: a trainer reports them (<code>trainer run trainer.toml</code>). The calls of agents are in{" "}
          <a href={href("episodes", { model: model.value })}>Episodes</a>.
        </Empty>
      )}
      {run && <OneRun key={run.model + run.run} run={run} other={other} runs={list!} />}
    </>
  );
}

/** The steps of a run, kept up to date by events. */
function useSteps(run: Run | undefined): { steps: Steps | null; error: string | null } {
  const grownSteps = useSignal<Steps | null>(null);
  const ask = async (signal: AbortSignal) => (grownSteps.value = run ? await loadSteps(run, signal) : null);
  const loaded = useLoaded(ask, [run?.model, run?.run, session.value]);
  useEvents(
    (events) => {
      for (const event of events) {
        const now = grownSteps.peek();
        if (event.kind === "gap") loaded.again();
        if (!now || !is(event, "trainer") || event.model !== now.model || (event.data["run"] ?? now.run) !== now.run) continue;
        const { step, version, figures } = event.data as { step: number; version?: number; figures: Record<string, number> };
        if (now.every === 1) grownSteps.value = grown(now, { step, version: version ?? null, at: event.at, figures });
        else loaded.again();
      }
    },
    [run?.model, run?.run],
  );
  return { steps: run ? grownSteps.value : null, error: loaded.error.value };
}

function OneRun({ run, other, runs }: { run: Run; other: Run | undefined; runs: Run[] }) {
  const mine = useSteps(run);
  const second = useSteps(other);
  const byTime = route.value.query.get("x") === "time";
  const width = Number(route.value.query.get("smooth") ?? 1);
  if (!mine.steps) return mine.error ? <Failure text={mine.error} /> : <Loading />;
  const steps = mine.steps;
  return (
    <>
      <Controls run={run} runs={runs} other={other} />
      <Failure text={mine.error ?? second.error} />
      <Headline steps={steps} run={run} />
      <Charts steps={steps} other={second.steps} byTime={byTime} width={width} />
      <h2>Figures of the last steps</h2>
      <LastSteps steps={steps} />
    </>
  );
}

function Controls({ run, runs, other }: { run: Run; runs: Run[]; other: Run | undefined }) {
  const query = route.value.query;
  const label = (one: Run) => `${one.run || "unnamed"} (${plural(one.steps, "step")}, ${clock(one.began_at)})`;
  const chosen = (name: string) => (event: Event) => setQuery({ [name]: (event.target as HTMLSelectElement).value });
  return (
    <div class="toolbar">
      <label>
        Run
        <select value={run.run} onChange={chosen("run")}>
          {runs.map((one) => (
            <option key={one.run} value={one.run}>
              {label(one)}
            </option>
          ))}
        </select>
      </label>
      <label>
        Compare with
        <select value={other?.run ?? ""} onChange={chosen("with")} disabled={runs.length < 2}>
          <option value="">{runs.length < 2 ? "no other run" : "none"}</option>
          {runs
            .filter((one) => one !== run)
            .map((one) => (
              <option key={one.run} value={one.run}>
                {label(one)}
              </option>
            ))}
        </select>
      </label>
      <label>
        Over
        <select value={query.get("x") ?? ""} onChange={chosen("x")}>
          <option value="">steps</option>
          <option value="time">time</option>
        </select>
      </label>
      <label>
        Mean over
        <select value={query.get("smooth") ?? ""} onChange={chosen("smooth")}>
          <option value="">1 step</option>
          <option value="5">5 steps</option>
          <option value="20">20 steps</option>
        </select>
      </label>
      {other && (
        <span class="quiet">
          solid: {run.run}; dashed: {other.run}
        </span>
      )}
    </div>
  );
}

const latest = (column: readonly (number | null)[] | undefined) => column?.findLast((value) => value !== null) ?? null;

function Headline({ steps, run }: { steps: Steps; run: Run }) {
  const at = steps.at.at(-1) ?? run.ended_at;
  const now = (name: string) => latest(steps.figures[name]);
  const all = now("reward_mean_all");
  const tokens = now("trained_tokens");
  const total = now("seconds/total");
  const version = latest(steps.version);
  const facts: [string, string][] = [
    ["Last step", String(steps.step.at(-1) ?? "–")],
    ["Version", version === null ? "–" : String(version)],
    all === null ? ["Reward, trained batch", short(now("reward_mean"))] : ["Reward, all episodes", short(all)],
    ["Evaluation", short(now("eval/reward_mean"))],
    ["Left out", share(now("excluded_share"))],
    ["Tokens/s", tokens && total ? short(tokens / total) : "–"],
    ["Step takes", duration(total)],
    [recorded.value ? "Recorded until" : "Last update", clock(at)],
  ];
  return (
    <dl class="facts">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** The places where a step made a new version. */
function marksOf(steps: Steps, x: readonly number[]): Mark[] {
  const marks: Mark[] = [];
  steps.version.forEach((version, i) => {
    if (version !== null && version !== (steps.version[i - 1] ?? null)) marks.push({ x: x[i]!, label: `version ${version}` });
  });
  return marks;
}

function Charts({ steps, other, byTime, width }: { steps: Steps; other: Steps | null; byTime: boolean; width: number }) {
  // Over time, another run is laid over this one from its own beginning.
  const shift = byTime && other ? (steps.at[0] ?? 0) - (other.at[0] ?? 0) : 0;
  const over = (of: Steps, by: number) => (byTime ? of.at.map((at) => at + by) : of.step);
  const axis = useMemo(() => joined(over(steps, 0), other ? over(other, shift) : []), [steps, other, byTime]);
  const marks = useMemo(() => marksOf(steps, over(steps, 0)), [steps, byTime]);
  const seconds: Plot = useMemo(
    () => ({ id: "seconds", title: "Seconds by step", hint: "The whole step, and the phases that take longest.", curves: phases(steps), format: "seconds" }),
    [Object.keys(steps.figures).join()],
  );
  const plots = [...PLOTS, seconds];
  const health = useLoaded((signal) => loadHealth(steps.model, steps.run, signal), [steps.model, steps.run, steps.step.at(-1), session.value]);
  const shown = plots.filter((plot) => plot.curves.some((curve) => known(curve, steps) || (other && known(curve, other))));
  const missing = plots.filter((plot) => !shown.includes(plot));
  return (
    <>
      <div class="charts">
        {shown.map((plot) => (
          <OnePlot key={plot.id} plot={plot} steps={steps} other={other} axis={axis} marks={marks} byTime={byTime} width={width} signals={health.value.value?.signals ?? []} />
        ))}
      </div>
      <p class="quiet">
        Dotted lines are weight updates; where they are close, some of them. Drag across a chart to look closer, double-click to see all.
        {missing.length > 0 && ` Without figures in this run: ${missing.map((plot) => plot.title.toLowerCase()).join(", ")}.`}
      </p>
    </>
  );
}

const known = (curve: Curve, steps: Steps) => curve.of(steps)?.some((value) => value !== null) ?? false;

interface PlotProps {
  plot: Plot;
  steps: Steps;
  other: Steps | null;
  axis: ReturnType<typeof joined>;
  marks: Mark[];
  byTime: boolean;
  width: number;
  signals: readonly Signal[];
}

function OnePlot({ plot, steps, other, axis, marks, byTime, width, signals }: PlotProps) {
  const lines = useMemo(() => {
    const of = (curve: Curve, from: Steps, bring: (column: readonly (number | null)[]) => readonly (number | null)[], isSecond: boolean): Line[] => {
      const column = curve.of(from);
      if (!column) return [];
      const values = bring(curve.points ? column : smoothed(column, width));
      return [{ label: isSecond ? `${curve.label}, ${from.run}` : curve.label, values, color: curve.color, dashed: isSecond, points: curve.points ?? false }];
    };
    return plot.curves.flatMap((curve) => [...of(curve, steps, axis.ofA, false), ...(other ? of(curve, other, axis.ofB, true) : [])]);
  }, [plot, steps, other, axis, width]);
  const first = plot.curves.find((curve) => known(curve, steps))?.of(steps);
  const now = latest(first);
  const newest = first?.findLastIndex((value) => value !== null) ?? -1;
  const signal = signals.find((one) => one.name === plot.signal);
  const state = signal?.in_step?.state;
  const format = plot.format === "share" ? share : plot.format === "seconds" ? duration : short;
  return (
    <section class="panel" aria-labelledby={`plot-${plot.id}`}>
      <div class="panel-head">
        <h2 id={`plot-${plot.id}`}>{plot.title}</h2>
        {state && <Badge tone={state === "ok" ? "good" : state}>{state === "ok" ? "in range" : "out of range"}</Badge>}
        {newest >= 0 && newest < steps.step.length - 1 && <span class="quiet">step {steps.step[newest]}</span>}
        <span class="figure">{format(now)}</span>
      </div>
      <Chart label={plot.title} x={axis.x} lines={lines} marks={marks} time={byTime} sync="run" format={format} {...(signal ? { band: [0, signal.most] as [number, number] } : {})} />
      <p class="hint">{plot.hint}</p>
    </section>
  );
}

/** A name that may go on in the next line after its parts. */
const broken = (name: string) => name.replace(/[_/]/g, "$&\u200b");

function LastSteps({ steps }: { steps: Steps }) {
  const names = SHOWN_IN_TABLE.filter((name) => steps.figures[name]);
  const rows = steps.step.map((_, i) => i).slice(-15).reverse();
  return (
    <Table
      caption="Figures of the last steps"
      rows={rows}
      id={(i) => steps.step[i]!}
      columns={[
        { head: "step", cell: (i) => steps.step[i], number: true },
        { head: "version", cell: (i) => steps.version[i] ?? "–", number: true },
        { head: "at", cell: (i) => <span class="together">{clock(steps.at[i])}</span> },
        ...names.map((name) => ({ head: broken(name), cell: (i: number) => short(steps.figures[name]![i]), number: true, class: "name" })),
      ]}
    />
  );
}
