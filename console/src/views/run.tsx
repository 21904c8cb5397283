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
import { Evaluations } from "../run/evaluations";
import { loadHealth, type Signal } from "../run/health";
import { GROUPS, phases, PLOTS, ratio, REWARD, type Curve, type Plot } from "../run/plots";
import { grown, joined, loadEvaluations, loadRuns, loadSteps, smoothed, type Column, type Run, type Steps } from "../run/steps";
import { ends, evaluated, trainingReward, verdict } from "../run/trend";
import { model, recorded } from "../shell";

/** Steps that a curve is the mean of, unless the reader chooses. */
const SMOOTH = "5";
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
  const width = Number(route.value.query.get("smooth") || SMOOTH);
  const loaded = useLoaded((signal) => loadEvaluations(run.model, signal), [run.model, session.value], recorded.value ? 0 : 10_000);
  const evaluations = loaded.value.value ?? [];
  const steps = useMemo(() => mine.steps && evaluated(mine.steps, evaluations), [mine.steps, evaluations]);
  const others = useMemo(() => second.steps && evaluated(second.steps, evaluations), [second.steps, evaluations]);
  if (!steps) return mine.error ? <Failure text={mine.error} /> : <Loading />;
  const found = verdict(steps, evaluations);
  return (
    <>
      <Controls run={run} runs={runs} other={other} />
      <Failure text={mine.error ?? second.error ?? loaded.error.value} />
      {found && (
        <p class={`answer ${found.tone}`} role="status">
          {found.words}
        </p>
      )}
      <Headline steps={steps} run={run} />
      <Charts steps={steps} other={others} byTime={byTime} width={width} />
      {evaluations.length > 1 && <Evaluations model={run.model} evaluations={evaluations} />}
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
        Smooth
        <select value={query.get("smooth") || SMOOTH} onChange={chosen("smooth")}>
          <option value="1">off</option>
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

interface Tile {
  name: string;
  value: string;
  /** The first and the last value, where a change has a meaning. */
  change?: readonly [number, number] | null;
  of?: "share" | "percent";
}

/** "+0.17"; for a rate or a time, in percent of the first. */
function changeWords([first, last]: readonly [number, number], of: Tile["of"]): string {
  const by = of === "percent" ? (last - first) / first : last - first;
  if (!Number.isFinite(by)) return "";
  return `${by > 0 ? "+" : by < 0 ? "−" : "±"}${of ? share(Math.abs(by)) : +Math.abs(by).toPrecision(2)}`;
}

function Headline({ steps, run }: { steps: Steps; run: Run }) {
  const column = (name: string): Column | undefined => steps.figures[name];
  const now = (name: string) => latest(column(name));
  const rate = ratio("trained_tokens", "seconds/total")(steps);
  const version = latest(steps.version);
  const reward = trainingReward(steps);
  const tiles: Tile[] = [
    { name: reward === column("reward_mean_all") ? "Reward, all episodes" : "Reward, trained batch", value: short(latest(reward)), change: ends(reward) },
    { name: "Held out", value: short(now("eval/reward_mean")), change: ends(column("eval/reward_mean"), 1) },
    { name: "Excluded", value: share(now("excluded_share")), change: ends(column("excluded_share")), of: "share" },
    { name: "Tokens/s", value: short(latest(rate)), change: ends(rate), of: "percent" },
    { name: "Step takes", value: duration(now("seconds/total")), change: ends(column("seconds/total")), of: "percent" },
    { name: "Last step", value: String(steps.step.at(-1) ?? "–") },
    { name: "Version", value: version === null ? "–" : String(version) },
    { name: "Last update", value: clock(steps.at.at(-1) ?? run.ended_at) },
  ];
  return (
    <dl class="facts">
      {tiles.map(({ name, value, change, of }) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>
            {value}
            {change && (
              <span class="change" title={`since the start: from ${of === "share" ? share(change[0]) : short(change[0])}`}>
                {changeWords(change, of)}
              </span>
            )}
          </dd>
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
    () => ({ id: "seconds", group: "Speed", title: "Seconds by step", hint: "The whole step, and the phases that take longest.", curves: phases(steps), format: "seconds" }),
    [Object.keys(steps.figures).join()],
  );
  const plots = [REWARD, ...PLOTS, seconds];
  const health = useLoaded((signal) => loadHealth(steps.model, steps.run, signal), [steps.model, steps.run, steps.step.at(-1), session.value]);
  const shown = plots.filter((plot) => plot.curves.some((curve) => known(curve, steps) || (other && known(curve, other))));
  const missing = plots.filter((plot) => !shown.includes(plot));
  const drawn = (plot: Plot) => (
    <OnePlot key={plot.id} plot={plot} steps={steps} other={other} axis={axis} marks={marks} byTime={byTime} width={width} signals={health.value.value?.signals ?? []} />
  );
  return (
    <>
      {health.value.value && <p class="quiet">Speed: {health.value.value.limits.line}.</p>}
      {shown[0] === REWARD && drawn(REWARD)}
      <p class="quiet">Ticks below an axis are weight updates. Drag across a chart to zoom, double-click to see all.</p>
      {GROUPS.map((group) => (
        <section key={group} aria-label={group}>
          <h2>{group}</h2>
          <div class="charts">{shown.filter((plot) => plot !== REWARD && plot.group === group).map(drawn)}</div>
        </section>
      ))}
      {missing.length > 0 && <p class="quiet">Without figures in this run: {missing.map((plot) => plot.title.toLowerCase()).join(", ")}.</p>}
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
  const newest = first?.findLastIndex((value) => value !== null) ?? -1;
  const signal = signals.find((one) => one.name === plot.signal);
  const state = signal?.in_step?.state;
  const Title = plot === REWARD ? "h2" : "h3";
  const format = plot.format === "share" ? share : plot.format === "seconds" ? duration : short;
  return (
    <section class="panel" aria-labelledby={`plot-${plot.id}`}>
      <div class="panel-head">
        <Title id={`plot-${plot.id}`}>{plot.title}</Title>
        {state && <Badge tone={state === "ok" ? "good" : state}>{state === "ok" ? "in range" : "out of range"}</Badge>}
        {newest >= 0 && newest < steps.step.length - 1 && <span class="quiet">step {steps.step[newest]}</span>}
        <span class="figure">{format(latest(first))}</span>
      </div>
      <Chart label={plot.title} x={axis.x} lines={lines} marks={marks} time={byTime} height={plot === REWARD ? 240 : 150} sync="run" format={format} {...(signal ? { band: [0, signal.most] as [number, number] } : {})} />
      <p class="hint">{plot.hint}</p>
    </section>
  );
}

/** A name that may go on in the next line after its parts. */
const broken = (name: string) => name.replace(/[_/]/g, "$&\u200b");

/** The batch that a step trained: it made the version after the batch's number. */
function batchOf(steps: Steps, i: number) {
  const version = steps.version[i];
  if (!version || version === steps.version[i - 1]) return "–";
  return <a href={href("episodes", { batch: version - 1, model: steps.model })}>{version - 1}</a>;
}

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
        { head: "batch", cell: (i) => batchOf(steps, i), number: true },
        { head: "at", cell: (i) => <span class="together">{clock(steps.at[i])}</span> },
        ...names.map((name) => ({ head: broken(name), cell: (i: number) => short(steps.figures[name]![i]), number: true, class: "name" })),
      ]}
    />
  );
}
