// Two evaluations next to each other: the tasks whose reward changed, with an episode of each.
import { useSignal } from "@preact/signals";
import { get, session } from "../api";
import { questionOf } from "../episodes/preview";
import { visible } from "../episodes/lines";
import type { EpisodePage, EpisodeRow } from "../episodes/types";
import { plural, short } from "../format";
import { useLoaded } from "../load";
import { Failure, Loading } from "../parts/notice";
import { Table } from "../parts/table";
import { href, route, setQuery } from "../router";
import { compared, type Pair, type Side } from "./compare";
import type { Evaluation } from "./trend";

/** The episodes of an evaluation that are compared, and the tasks that are shown of those whose reward changed. */
const EPISODES = 1_000;
const SHOWN = 12;

const load = (model: string, version: number, signal: AbortSignal) =>
  get<EpisodePage>("/admin/v1/episodes", { model, mode: "eval", version_min: version, version_max: version, preview: true, limit: EPISODES }, signal);

export function Evaluations({ model, evaluations }: { model: string; evaluations: readonly Evaluation[] }) {
  const query = route.value.query;
  const chosen = (name: string, other: Evaluation) => evaluations.find((one) => String(one.version) === query.get(name)) ?? other;
  const before = chosen("before", evaluations[0]!);
  const after = chosen("after", evaluations.at(-1)!);
  const menu = (name: string, label: string, value: Evaluation) => (
    <label>
      {label}
      <select value={value.version} onChange={(event) => setQuery({ [name]: event.currentTarget.value })}>
        {evaluations.map((one) => (
          <option key={one.version} value={one.version}>
            version {one.version}: {short(one.reward_mean)} ({plural(one.episodes, "episode")})
          </option>
        ))}
      </select>
    </label>
  );
  return (
    <section aria-label="Evaluations">
      <h2>Two evaluations</h2>
      <div class="toolbar">
        {menu("before", "Before", before)}
        {menu("after", "After", after)}
      </div>
      <Tasks key={`${before.version} ${after.version}`} model={model} before={before.version} after={after.version} />
    </section>
  );
}

function Tasks({ model, before, after }: { model: string; before: number; after: number }) {
  const both = useLoaded((signal) => Promise.all([load(model, before, signal), load(model, after, signal)]), [model, before, after, session.value]);
  const all = useSignal(false);
  if (!both.value.value) return both.error.value ? <Failure text={both.error.value} /> : <Loading />;
  const { pairs, better, worse, alone } = compared(both.value.value[0].episodes, both.value.value[1].episodes);
  const changed = pairs.filter((pair) => pair.by !== 0);
  const cell = (side: Side) => (
    <>
      <a href={href("episodes", side.first.episode_id)}>{short(side.mean)}</a>
      {side.episodes > 1 && <span class="quiet"> of {side.episodes}</span>}
    </>
  );
  const question = (row: EpisodeRow) => visible(questionOf(row.prompt_end ?? ""));
  return (
    <>
      <p>
        {plural(better, "task")} better, {worse} worse, {pairs.length - better - worse} equal{alone > 0 && `; ${alone} in one of the two only`}.
      </p>
      <Table
        caption="Tasks whose reward changed"
        rows={all.value ? changed : changed.slice(0, SHOWN)}
        id={(pair: Pair) => pair.task}
        empty="No task's reward changed."
        columns={[
          { head: "Task", cell: (pair) => <a href={href("episodes", { task: pair.task, mode: "eval" })}>{pair.task}</a> },
          { head: "Question", cell: (pair) => <bdi class="quiet">{question(pair.before.first)}</bdi>, class: "wide" },
          { head: `Version ${before}`, cell: (pair) => cell(pair.before), number: true },
          { head: `Version ${after}`, cell: (pair) => cell(pair.after), number: true },
          { head: "Change", cell: (pair) => `${pair.by > 0 ? "+" : "−"}${short(Math.abs(pair.by))}`, number: true },
        ]}
      />
      {changed.length > SHOWN && (
        <p>
          <button type="button" onClick={() => (all.value = !all.value)}>
            {all.value ? "Show the largest losses" : `Show all ${changed.length}`}
          </button>
        </p>
      )}
    </>
  );
}
