// The dialog that asks before something is done, and names what happens.
import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { messageOf } from "../api";

interface Question {
  title: string;
  /** What happens, and to what. */
  body: ComponentChildren;
  /** The word on the button: "Drain". */
  action: string;
  dangerous?: boolean;
  act: () => Promise<unknown>;
}

const question = signal<Question | null>(null);
const busy = signal(false);
const failure = signal<string | null>(null);

/** Asks, does it, and stays open with the gateway's words if it fails. */
export function confirm(request: Question): void {
  failure.value = null;
  busy.value = false;
  question.value = request;
}

async function act(request: Question): Promise<void> {
  busy.value = true;
  try {
    await request.act();
    question.value = null;
  } catch (error) {
    failure.value = messageOf(error);
  } finally {
    busy.value = false;
  }
}

/** Once in the page. */
export function ConfirmDialog() {
  const box = useRef<HTMLDialogElement>(null);
  const request = question.value;
  useEffect(() => {
    const dialog = box.current!;
    if (request && !dialog.open) dialog.showModal();
    if (!request && dialog.open) dialog.close();
  }, [request]);
  return (
    <dialog ref={box} aria-labelledby="confirm-title" onClose={() => (question.value = null)}>
      {request && (
        <form
          method="dialog"
          onSubmit={(event) => {
            event.preventDefault();
            void act(request);
          }}
        >
          <h2 id="confirm-title">{request.title}</h2>
          <div>{request.body}</div>
          {failure.value && <p role="alert" class="failure">{failure.value}</p>}
          <div class="actions">
            <button type="button" autofocus onClick={() => (question.value = null)}>
              Cancel
            </button>
            <button type="submit" class={request.dangerous ? "danger" : "primary"} disabled={busy.value}>
              {busy.value ? "Doing it…" : request.action}
            </button>
          </div>
        </form>
      )}
    </dialog>
  );
}
