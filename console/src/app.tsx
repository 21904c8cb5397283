// The frame around every view: navigation, the key, the state of the stream, help, and the dialog that asks.
import { useSignal } from "@preact/signals";
import type { ComponentType } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { asking, giveKey, session } from "./api";
import { press, shortcuts, useShortcuts } from "./keys";
import { streamState } from "./live";
import { moment } from "./episodes/words";
import { useLoaded } from "./load";
import { ConfirmDialog } from "./parts/confirm";
import { Failure, Loading } from "./parts/notice";
import { go, href, route, setQuery } from "./router";
import { loadShell, model, recorded, shell } from "./shell";
import { CanaryView } from "./views/canary";
import { EnginesView } from "./views/engines";
import { EpisodeView } from "./views/episode";
import { EpisodesView } from "./views/episodes";
import { FilesView } from "./views/files";
import { HealthView } from "./views/health";
import { RunView } from "./views/run";
import { StalenessView } from "./views/staleness";

interface Place {
  name: string;
  title: string;
  key: string;
  view: ComponentType;
}

const PLACES: Place[] = [
  { name: "run", title: "Run", key: "g r", view: RunView },
  { name: "episodes", title: "Episodes", key: "g e", view: EpisodesView },
  { name: "staleness", title: "Staleness", key: "g s", view: StalenessView },
  { name: "engines", title: "Engines", key: "g n", view: EnginesView },
  { name: "canary", title: "Canary", key: "g v", view: CanaryView },
  { name: "health", title: "Health", key: "g h", view: HealthView },
  { name: "files", title: "Config", key: "g c", view: FilesView },
];

const STREAM = {
  live: "live",
  connecting: "connecting…",
  waiting: "lost; trying again",
  ended: "not live",
};

export function App() {
  const helping = useSignal(false);
  const loaded = useLoaded(loadShell, [session.value]);
  useEffect(() => {
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
  useShortcuts([
    ...PLACES.map((place) => ({ keys: place.key, text: place.title, act: () => go(place.name) })),
    { keys: "?", text: "This help", act: () => (helping.value = true) },
  ]);
  const name = route.value.path[0] ?? "run";
  const place = PLACES.find((one) => one.name === name);
  useEffect(() => {
    document.title = `${route.value.path[1] ?? place?.title ?? "Not found"} · headgate`;
  }, [route.value]);
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => skip(event)}>
        Skip to the view
      </a>
      <header>
        <a class="brand" href={href("run")}>
          headgate
        </a>
        <nav aria-label="Views">
          {PLACES.map((one) => (
            <a key={one.name} href={href(one.name, { model: model.value })} aria-current={one === place ? "page" : undefined} title={`Keys: ${one.key}`}>
              {one.title}
            </a>
          ))}
        </nav>
        <ModelChoice />
        <span class={`stream ${recorded.value ? "recorded" : streamState.value}`} role="status">
          {recorded.value ? `recorded until ${moment(shell.value!.now)}` : STREAM[streamState.value]}
        </span>
        <button type="button" onClick={() => (helping.value = true)} aria-label="Keyboard shortcuts">
          ?
        </button>
      </header>
      <main id="main" tabIndex={-1} key={session.value}>
        {asking.value !== null ? <KeyForm why={asking.value} /> : <Shown place={place} error={loaded.error.value} />}
      </main>
      <Help open={helping.value} close={() => (helping.value = false)} />
      <ConfirmDialog />
    </>
  );
}

function ModelChoice() {
  const models = shell.value?.models.filter((one) => one.trained) ?? [];
  if (models.length < 2) return null;
  return (
    <label class="model-choice">
      Model{" "}
      <select value={model.value ?? models[0]!.name} onChange={(event) => setQuery({ model: event.currentTarget.value })}>
        {models.map((one) => (
          <option key={one.name}>{one.name}</option>
        ))}
      </select>
    </label>
  );
}

/** Views begin once the gateway has described itself: before that they would send requests without a key, or for what a recorded run has not. */
function Shown({ place, error }: { place: Place | undefined; error: string | null }) {
  if (!shell.value) return error ? <Failure text={error} /> : <Loading />;
  return place ? <View place={place} /> : <NotFound />;
}

function View({ place }: { place: Place }) {
  const id = route.value.path[1];
  if (place.name === "episodes" && id) return <EpisodeView id={id} key={id} />;
  return <place.view />;
}

function NotFound() {
  return (
    <>
      <h1>Not found</h1>
      <p>
        The console has no such page. <a href={href("run")}>The run</a>
      </p>
    </>
  );
}

function skip(event: Event): void {
  event.preventDefault();
  document.getElementById("main")!.focus();
}

function KeyForm({ why }: { why: string }) {
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => field.current!.focus(), []);
  return (
    <form
      class="key-form"
      onSubmit={(event) => {
        event.preventDefault();
        giveKey(field.current!.value);
      }}
    >
      <h1>Admin key</h1>
      <p>
        This gateway asks for a key: <code>[admin] key</code> of its file, or a project's. It stays in the memory of this tab; a reload asks
        again.
      </p>
      {why && <p role="alert" class="failure">{why}</p>}
      <label for="key">Key</label>
      <input id="key" ref={field} type="password" autocomplete="off" required spellcheck={false} />
      <button type="submit" class="primary">
        Open
      </button>
    </form>
  );
}

function Help({ open, close }: { open: boolean; close: () => void }) {
  const box = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    if (open && !box.current!.open) box.current!.showModal();
    if (!open && box.current!.open) box.current!.close();
  }, [open]);
  return (
    <dialog ref={box} aria-labelledby="help-title" onClose={close}>
      {open && (
        <>
          <h2 id="help-title">Keyboard</h2>
          <dl class="keys">
            {[...shortcuts].map((one) => (
              <div key={one.keys}>
                <dt>
                  {one.keys.split(" ").map((key) => (
                    <kbd key={key}>{key}</kbd>
                  ))}
                </dt>
                <dd>{one.text}</dd>
              </div>
            ))}
          </dl>
          <p class="quiet">In a list: arrows, Page Up and Down, Home, End; Enter opens. Tab goes from part to part.</p>
          <div class="actions">
            <button type="button" autofocus onClick={close}>
              Close
            </button>
          </div>
        </>
      )}
    </dialog>
  );
}
