import { Empty } from "../parts/notice";

export function EnginesView() {
  return (
    <>
      <h1>Engines and nodes</h1>
      <Empty>This view is being built.</Empty>
    </>
  );
}
