// Staleness: StaleFlow's batches as a table that fills live, what waits for what, and which groups hold the others up.
import { get, session } from "../api";
import { duration, plural } from "../format";
import { is, useEvents } from "../live";
import { useLoaded } from "../load";
import { Badge, type Tone } from "../parts/badge";
import { Empty, Failure, Loading } from "../parts/notice";
import { Table } from "../parts/table";
import { href } from "../router";
import { model, recorded } from "../shell";
import { begun, drawn, entries, waits, type Batch, type Entry, type Ledger } from "../staleness/ledger";

export function StalenessView() {
  const ask = (signal: AbortSignal) => get<Ledger>("/admin/v1/staleness", { model: model.value }, signal);
  const { value, error, again } = useLoaded(ask, [model.value, session.value], recorded.value ? 0 : 5_000);
  useEvents((events) => events.some((event) => is(event, "group", "batch", "version", "episode", "gap")) && again());
  const ledger = value.value;
  return (
    <>
      <h1>Staleness</h1>
      <Failure text={error.value} />
      {!ledger && !error.value && <Loading />}
      {ledger && <Shown ledger={ledger} />}
    </>
  );
}

function Shown({ ledger }: { ledger: Ledger }) {
  const waiting = Object.entries(ledger.waiting);
  const facts: [string, string][] = [
    ["Late groups", ledger.late_groups],
    ["Bound (eta)", plural(ledger.eta, "version")],
    ["Batch", plural(ledger.batch_size, "group")],
    ["Newest version", String(ledger.version)],
    ["Next to train", `batch ${ledger.consumed}`],
    ["Groups waiting", String(waiting.length)],
  ];
  return (
    <>
      <dl class="facts">
        {facts.map(([name, text]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
      <h2>What waits for what</h2>
      <ul class="waits" aria-live="polite">
        {waits(ledger).map((sentence) => (
          <li key={sentence}>{sentence}</li>
        ))}
      </ul>
      <h2>Batches</h2>
      {ledger.batches.length ? <Batches ledger={ledger} /> : <Empty>No batch has a group: no training episode is open.</Empty>}
      <p class="hint">
        A field is a place for one group: full when all its rewards are there, half full while its episodes run. It shows the group's progress and the
        version that it began with; a group may be trained until its batch is {ledger.eta} past that version.
      </p>
      <div class="columns">
        <section>
          <h2>Slowest groups</h2>
          <Slowest ledger={ledger} />
        </section>
        <section>
          <h2>Not trained, and why</h2>
          <Table
            caption="Groups and episodes that were lost, by reason"
            rows={ledger.lost}
            id={(one) => `${one.kind} ${one.reason}`}
            empty="Nothing was lost recently."
            columns={[
              { head: "What happened", cell: (one) => one.kind },
              { head: "Reason", cell: (one) => <a href={href("episodes", { reason: one.reason, model: model.value })}>{one.reason}</a> },
              { head: "Times", cell: (one) => one.count, number: true },
            ]}
          />
        </section>
        <section>
          <h2>Waiting for a place</h2>
          <Table
            caption="Groups that wait for a place"
            rows={waiting}
            id={([group]) => group}
            empty="No group waits."
            columns={[
              { head: "Group", cell: ([group]) => <Group id={group} /> },
              { head: "Episodes", cell: ([, count]) => count, number: true },
            ]}
          />
        </section>
      </div>
    </>
  );
}

function Group({ id }: { id: string }) {
  return <a href={href("episodes", { group: id, model: model.value })}>{id}</a>;
}

const TONES: Record<string, Tone> = { READY: "good", READY_WITH_CAPACITY: "good", STUCK: "bad", PENDING: "plain" };
const WORDS: Record<string, string> = { READY: "complete", READY_WITH_CAPACITY: "complete, with places left", STUCK: "stuck", PENDING: "filling" };

function Batches({ ledger }: { ledger: Ledger }) {
  const state = (batch: Batch) =>
    batch.leased ? <Badge tone="info">being trained</Badge> : <Badge tone={TONES[batch.state] ?? "plain"}>{WORDS[batch.state] ?? batch.state}</Badge>;
  const rows = begun(ledger.batches);
  const empty = ledger.batches.length - rows.length;
  return (
    <>
      <Table
        caption="Batches and the groups in them"
        rows={rows}
        id={(batch) => batch.batch}
        columns={[
          { head: "Batch", cell: (batch) => <strong>{batch.batch}</strong>, number: true },
          { head: "State", cell: state },
          { head: "Complete", cell: (batch) => `${batch.occupied} of ${ledger.batch_size}`, number: true },
          {
            head: "Groups",
            cell: (batch) => <Places batch={batch} size={ledger.batch_size} />,
            class: "wide",
          },
        ]}
      />
      {empty > 0 && <p class="hint">{plural(empty, "more batch", "more batches")} without a group may be begun within the bound.</p>}
    </>
  );
}

function Places({ batch, size }: { batch: Batch; size: number }) {
  const { shown, left } = drawn(entries(batch, size));
  return (
    <ul class="entries" aria-label={`Groups of batch ${batch.batch}`}>
      {shown.map((entry, i) => (
        <li key={entry?.group.group_id ?? `free-${i}`}>{entry ? <Place entry={entry} /> : <span class="entry free">free</span>}</li>
      ))}
      {left && <li class="quiet">and {left}</li>}
    </ul>
  );
}

function Place({ entry }: { entry: Entry }) {
  const { group, done, members } = entry;
  const title = `${group.group_id}: ${Object.entries(group.members).map(([state, count]) => `${count} ${state}`).join(", ")}; began with version ${group.version}`;
  return (
    <a class={`entry ${group.state}`} href={href("episodes", { group: group.group_id, model: model.value })} title={title} aria-label={`${done}/${members} v${group.version}, ${title}`}>
      <span class="entry-fill" style={{ width: `${(100 * done) / Math.max(1, members)}%` }} />
      <span class="entry-text">
        {done}/{members} v{group.version}
      </span>
    </a>
  );
}

function Slowest({ ledger }: { ledger: Ledger }) {
  return (
    <Table
      caption="The groups whose episodes run longest"
      rows={ledger.slowest ?? []}
      id={(one) => one.group_id}
      empty="No group runs."
      columns={[
        { head: "Group", cell: (one) => <Group id={one.group_id} /> },
        { head: "Batch", cell: (one) => ledger.batches.find((batch) => batch.groups.some((group) => group.group_id === one.group_id))?.batch ?? "–", number: true },
        { head: "Runs since", cell: (one) => duration(one.oldest_s), number: true },
        {
          head: "Episodes",
          cell: (one) =>
            one.episodes.slice(0, 4).map((id) => (
              <>
                <a key={id} href={href("episodes", id)}>
                  {id}
                </a>{" "}
              </>
            )),
        },
      ]}
    />
  );
}
