// Config and logs of a run: the settings that gateway and trainer use, and the ends of the logs on the gateway's machine.
import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { session } from "../api";
import { useLoaded } from "../load";
import { Tabs } from "../episodes/tabs";
import { clock, plural } from "../format";
import { Badge } from "../parts/badge";
import { Empty, Failure, Loading } from "../parts/notice";
import { Table } from "../parts/table";
import { route, setQuery } from "../router";
import { chosen, linesWith, loadLogs, loadSettings, loadTail, shownValue, TAIL_BYTES, type Log, type Program, type Setting } from "../run/files";

const VIEWS = ["config", "logs"] as const;

export function FilesView() {
  const view = VIEWS.find((name) => name === route.value.query.get("view")) ?? "config";
  return (
    <>
      <h1>Config and logs</h1>
      <Tabs names={VIEWS} chosen={view} choose={(name) => setQuery({ view: name })} label="Config and logs of the run">
        {view === "config" ? <Config /> : <Logs />}
      </Tabs>
    </>
  );
}

function Config() {
  const { value, error } = useLoaded(loadSettings, [session.value]);
  const text = useSignal("");
  const all = useSignal(false);
  return (
    <>
      <div class="toolbar">
        <label>
          Settings with <input type="search" value={text.value} placeholder="name or value" onInput={(event) => (text.value = event.currentTarget.value)} />
        </label>
        <label>
          <input type="checkbox" checked={all.value} onChange={(event) => (all.value = event.currentTarget.checked)} /> Show defaults too
        </label>
      </div>
      <Failure text={error.value} />
      {!value.value && !error.value && <Loading />}
      {value.value?.programs.map((one) => <ProgramSettings key={one.program} program={one} text={text.value} all={all.value} />)}
    </>
  );
}

function ProgramSettings({ program, text, all }: { program: Program; text: string; all: boolean }) {
  const changed = program.settings.filter((one) => one.changed).length;
  return (
    <section>
      <h2>{program.program === "gateway" ? "Gateway" : "Trainer"}</h2>
      {program.why ? (
        <Empty>No settings: {program.why}.</Empty>
      ) : (
        <>
          <p class="quiet">
            {plural(changed, "setting")} of {program.settings.length} not at the default. {program.at ? `As it started at ${clock(program.at)}` : "As it runs now"}; keys, passwords, arguments and
            variables are hidden (***).
          </p>
          <Table
            caption={`Settings of the ${program.program}`}
            stacked
            rows={chosen(program.settings, text, all)}
            id={(one) => one.name}
            empty={text ? "No setting contains this text." : "All settings are at their defaults."}
            columns={[
              { head: "Setting", cell: (one) => <code>{one.name}</code> },
              { head: "Value", cell: (one) => <Value setting={one} mark={all} /> },
              { head: "Default", cell: (one) => <code class="quiet">{shownValue(one.default)}</code> },
            ]}
          />
        </>
      )}
    </section>
  );
}

/** `mark`: settings at their defaults are shown, too. */
function Value({ setting, mark }: { setting: Setting; mark: boolean }) {
  return (
    <span>
      <code>{shownValue(setting.value)}</code> {mark && setting.changed && <Badge tone="info">changed</Badge>}
    </span>
  );
}

function Logs() {
  const { value, error, again } = useLoaded(loadLogs, [session.value]);
  const refreshed = useSignal(0);
  const text = useSignal("");
  const found = value.value;
  const log = found?.logs.find((one) => one.path === route.value.query.get("log")) ?? found?.logs[0];
  return (
    <>
      <Failure text={error.value} />
      {!found && !error.value && <Loading />}
      {found && log && (
        <>
          <div class="toolbar">
            <label>
              Log{" "}
              <select value={log.path} onChange={(event) => setQuery({ log: event.currentTarget.value })}>
                {found.logs.map((one) => (
                  <option key={one.path} value={one.path}>
                    {nameOf(one, found.logs)}
                  </option>
                ))}
              </select>
            </label>
            <label>
              Lines with <input type="search" value={text.value} placeholder="text" onInput={(event) => (text.value = event.currentTarget.value)} />
            </label>
            <button type="button" onClick={() => (again(), (refreshed.value += 1))}>
              Refresh
            </button>
          </div>
          <Tail key={log.path} log={log.path} text={text.value} refreshed={refreshed.value} />
        </>
      )}
      {found && !found.logs.length && <Empty>No log of this run is on the gateway's machine.</Empty>}
      {found && found.missing.length > 0 && (
        <ul class="waits">
          {found.missing.map((one) => (
            <li key={one.program}>
              No log of the {one.program}: <span class="quiet">{one.why}</span>
            </li>
          ))}
        </ul>
      )}
    </>
  );
}

function Tail({ log, text, refreshed }: { log: string; text: string; refreshed: number }) {
  const { value, error } = useLoaded((signal) => loadTail(log, signal), [log, refreshed, session.value]);
  const box = useRef<HTMLPreElement>(null);
  const tail = value.value;
  useEffect(() => {
    if (box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [tail, text]);
  if (!tail) return error.value ? <Failure text={error.value} /> : <Loading />;
  const lines = linesWith(tail.text, text);
  const part = tail.bytes > TAIL_BYTES ? `the last ${TAIL_BYTES / 1024} KiB of ${Math.round(tail.bytes / 1024)}` : "the whole log";
  return (
    <>
      <Failure text={error.value} />
      <p class="quiet log-path">
        {tail.path}, {part}, changed at {clock(tail.changed_at)}: {plural(tail.text ? lines.length : 0, "line")}
        {text && " with this text"}
      </p>
      <pre class="log" ref={box} tabIndex={0} role="region" aria-label="End of the log">
        {lines.join("\n") || (text ? "No line contains this text." : "The log is empty.")}
      </pre>
    </>
  );
}

/** The file's name; with its folder where two have the same. */
function nameOf(log: Log, logs: readonly Log[]): string {
  const parts = log.path.split("/");
  const same = logs.filter((one) => one.path.split("/").at(-1) === parts.at(-1)).length > 1;
  return same ? parts.slice(-2).join("/") : parts.at(-1)!;
}
