/** Tabs, as the ARIA practices have them: one stop of the Tab key, the arrows choose. */

import type { ComponentChildren } from "preact";
import { useRef } from "preact/hooks";

interface Props<Name extends string> {
  label: string;
  names: readonly Name[];
  chosen: Name;
  choose: (name: Name) => void;
  children: ComponentChildren;
}

export function Tabs<Name extends string>({ label, names, chosen, choose, children }: Props<Name>) {
  const list = useRef<HTMLDivElement>(null);
  const keyDown = (event: KeyboardEvent) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -names.indexOf(chosen), End: names.length - 1 - names.indexOf(chosen) }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const next = (names.indexOf(chosen) + by + names.length) % names.length;
    choose(names[next]!);
    list.current!.querySelectorAll<HTMLElement>("[role=tab]")[next]!.focus();
  };
  return (
    <>
      <div ref={list} class="tabs" role="tablist" aria-label={label} onKeyDown={keyDown}>
        {names.map((name) => (
          <button
            key={name}
            type="button"
            role="tab"
            id={`tab-${name}`}
            aria-controls="tab-panel"
            aria-selected={name === chosen}
            tabIndex={name === chosen ? 0 : -1}
            onClick={() => choose(name)}
          >
            {name}
          </button>
        ))}
      </div>
      <div class="tab-panel" role="tabpanel" id="tab-panel" aria-labelledby={`tab-${chosen}`}>
        {children}
      </div>
    </>
  );
}
