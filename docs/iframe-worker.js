// Browsers start no workers on pages that are opened from disk. There, the search runs in a hidden frame that has the
// interface of a worker. The theme recognises it by the name IFrameWorker.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.document.open();
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve) => this.frame.addEventListener("load", resolve));
      const script = inside.document.createElement("script");
      script.src = url;
      inside.document.append(inside.document.createElement("html"));
      inside.document.documentElement.append(script);
      inside.document.close();
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
